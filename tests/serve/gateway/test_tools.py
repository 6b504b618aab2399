"""Tool calls: templates' formats, parsing of generated text, and OpenAI's client."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema
import numpy as np
import openai as sdk
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lathe_serving.gateway.template import BREAK, ChatTemplate, ChatTokenizer
from lathe_serving.gateway.tools import (
    HERMES,
    LLAMA,
    CallReader,
    Format,
    call_format_for,
    merge_deltas,
    tool_grammar,
)
from lathe_serving.runtime.grammar import Grammars
from lathe_serving.runtime.protocol import FinishReason
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_chat import TEMPLATE as PLAIN
from tests.serve.gateway.test_structured import FORMAT, conforms
from tests.support.gateways import opened, with_chat_template
from tests.support.tables import quick_only

TURNS = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}
{%- for call in m.tool_calls %}
{{- OPENING + '{"name": "' + call.function.name + '", "KEY": ' }}
{{- call.function.arguments | tojson }}{{ '}' + CLOSING }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
HEAD = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"


def chat_template(form: Format) -> str:
    turns = TURNS.replace("OPENING", repr(form.opening)).replace("CLOSING", repr(form.closing))
    return HEAD + turns.replace("KEY", form.key)


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMES = ["get_weather", "now"]
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module", params=["Hermes", "Llama"])
def form(request: pytest.FixtureRequest) -> Format:
    return {"Hermes": HERMES, "Llama": LLAMA}[request.param]


@pytest.fixture(scope="module")
def chat(
    server: TritonServer, form: Format, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAI]:
    changes = with_chat_template(server, chat_template(form), tmp_path_factory.mktemp("tools"))
    with opened(server, **changes) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60)


def require_valid(calls: Any) -> None:
    schemas = {"get_weather": WEATHER["function"]["parameters"], "now": {"maxProperties": 0}}
    assert calls
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_of_random_weights_calls_what_it_has_to(chat: OpenAI, seed: int) -> None:
    found = chat.chat.completions.create(
        model="gpt", messages=ASKED, tools=TOOLS, tool_choice="required", seed=seed, n=2
    )
    for choice in found.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        require_valid(choice.message.tool_calls)


def test_a_chosen_tool_is_called_once(chat: OpenAI) -> None:
    for name in ("now", "get_weather"):
        chosen: Any = {"type": "function", "function": {"name": name}}
        found = chat.chat.completions.create(
            model="gpt", messages=ASKED, tools=TOOLS, tool_choice=chosen, temperature=2, n=4
        )
        for choice in found.choices:
            (call,) = choice.message.tool_calls or []
            require_valid([call])
            assert call.function.name == name  # type: ignore[union-attr]


def test_one_call_is_enough_where_they_are_not_parallel(chat: OpenAI) -> None:
    found = chat.chat.completions.create(
        model="gpt",
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        n=4,
    )
    assert [len(choice.message.tool_calls or []) for choice in found.choices] == [1] * 4


def test_a_stream_is_the_whole_in_pieces(chat: OpenAI) -> None:
    options: dict[str, Any] = {"model": "gpt", "messages": ASKED, "tools": TOOLS, "seed": 5}
    options |= {"tool_choice": "required", "max_tokens": 600}
    whole = chat.chat.completions.create(**options)
    pieces = list(chat.chat.completions.create(**options, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    names, arguments = [], []
    for piece in pieces:
        for call in piece.choices[0].delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(names) and call.id and call.type == "function"
                names.append(call.function.name)
                arguments.append("")
            else:
                assert call.id is None and call.index == len(names) - 1
            arguments[-1] += call.function.arguments or ""
    expected = [call.function for call in whole.choices[0].message.tool_calls or []]
    assert names == [function.name for function in expected]
    assert arguments == [function.arguments for function in expected]
    assert len(pieces) > len(names) + 3  # arguments are streamed as they are generated


def test_the_sdk_puts_a_stream_together(chat: OpenAI) -> None:
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with chat.chat.completions.stream(
        model="gpt", messages=ASKED, tools=[strict], tool_choice="required", seed=1
    ) as stream:
        for _ in stream:
            pass
        require_valid(stream.get_final_completion().choices[0].message.tool_calls)


def test_a_model_may_say_something_instead(chat: OpenAI, form: Format) -> None:
    """A model with random weights does not start a tool call."""
    banned = {"logit_bias": {str(byte_id("{")): -100}} if form is LLAMA else {}
    banned |= {"ignore_eos": True}
    found = chat.chat.completions.create(
        model="gpt", messages=ASKED, tools=TOOLS, max_tokens=20, n=3, extra_body=banned
    )
    for choice in found.choices:
        assert choice.message.tool_calls is None and choice.message.content


@pytest.mark.parametrize("seed", range(5))
def test_a_started_call_is_completed(byte_tokenizer: Tokenizer, form: Format, seed: int) -> None:
    written = tool_grammar(form, TOOLS, may_reply=True, may_call_more=False)
    grammar = Grammars(byte_tokenizer, 257, [256]).start(json.dumps({"grammar": written}), [])
    begun = "So:\n<tool_call>" if form is HERMES else "{"
    rng, ids = np.random.default_rng(seed), byte_tokenizer.encode(begun).ids
    for token in ids:
        assert grammar.allowed()[token]  # type: ignore[index]
        grammar.add(token)
    while (allowed := grammar.allowed()) is not None and not allowed[256]:
        ids.append(int(rng.choice(np.flatnonzero(allowed))))
        grammar.add(ids[-1])
    text = byte_tokenizer.decode(ids)
    (call,) = merge_deltas(CallReader(form, NAMES).add(text, "stop"))["tool_calls"]
    require_valid([ChatCompletionMessageFunctionToolCall.model_validate(call)])


def byte_id(letter: str) -> int:
    from tests.support.tokenizers import byte_tokenizer

    found: int = byte_tokenizer().token_to_id(letter)
    return found


def test_tools_that_may_not_be_called_are_not_listed(chat: OpenAI) -> None:
    lengths = []
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}):
        found = chat.chat.completions.create(
            model="gpt",
            messages=ASKED,
            max_tokens=1,
            **options,  # type: ignore[arg-type]
        )
        assert found.usage is not None
        lengths.append(found.usage.prompt_tokens)
    assert lengths[0] == lengths[1] < lengths[2]


def test_the_prompt_is_that_of_transformers(byte_tokenizer: Tokenizer, form: Format) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer)
    template = chat_template(form)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": {"b": [1], "a": "é"}},
    }
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    expected = theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(template).render(messages, tools=TOOLS) == expected
    assert '"name": "now", "' + form.key + '": {"b": [1], "a": "é"}' in expected


def test_a_conversation_continues_after_a_call(chat: OpenAI, form: Format) -> None:
    made = (
        chat.chat.completions.create(
            model="gpt", messages=ASKED, tools=TOOLS, tool_choice="required", seed=2
        )
        .choices[0]
        .message
    )
    calls = made.tool_calls or []
    answers: Any = [{"role": "tool", "tool_call_id": c.id, "content": "5 degrees"} for c in calls]
    body = {"model": "gpt", "messages": [*ASKED, made.model_dump(), *answers], "tools": TOOLS}
    told: Any = chat.post("/../tokenize", cast_to=object, body=body)
    text: Any = chat.post(
        "/../detokenize", cast_to=object, body={"model": "gpt", "tokens": told["tokens"]}
    )
    for call in calls:
        arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)  # type: ignore[union-attr]
        assert form.head(call.function.name) + arguments in text["prompt"]  # type: ignore[union-attr]
    assert text["prompt"].count("5 degrees") == len(calls)


CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def called(arguments: Any) -> list[Any]:
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


HISTORIES: list[tuple[list[Any], str]] = [
    # Arguments as this or another server has given them: what the prompt contains.
    (called('{"b": [1], "a": "é"}'), '{"b": [1], "a": "é"}'),
    (called({"a": 1}), '{"a": 1}'),
    (called('{"city":'), json.dumps('{"city":')),
    (called("[1, 2]"), '"[1, 2]"'),
    (called([1, 2]), "[1, 2]"),
    (called("null"), '"null"'),
    (called(None), "{}"),
    (called(""), "{}"),
    (called("5"), '"5"'),
    (called(5), "5"),
    (called("now, please"), '"now, please"'),
    (called("[" * 5000)[:1], '"[[['),
    (called('{"a": NaN}'), '{"a": NaN}'),
    # Messages.
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "No."),
    (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Well. "},
                    {"type": "refusal", "refusal": "No"},
                ],
            }
        ],
        "Well. No",
    ),
    ([{"role": "assistant", "content": None, "refusal": "Never."}], "Never."),
    ([{"role": "assistant"}], "<|assistant|>"),
    ([{"role": "assistant", "content": []}], "<|assistant|>"),
    ([{"role": "assistant", "content": "", "tool_calls": []}], "<|assistant|>"),
    ([{"role": "assistant", "content": "x", "tool_calls": None, "function_call": None}], "x"),
    ([{"role": "assistant", "content": "both", "tool_calls": [CALL]}], "both"),
    ([{"role": "tool", "content": "answers no call"}], "answers no call"),
    ([{"role": "tool", "tool_call_id": "c", "content": None}], "<|tool|>"),
    (
        [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5 C"}]}],
        "5 C",
    ),
    ([*called("{}"), {"role": "user", "content": "no answer"}], "no answer"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "a b!"}}]}], '"a b!"'),
]


@pytest.mark.parametrize(("history", "expected"), HISTORIES)
def test_a_history_is_data(chat: OpenAI, history: list[Any], expected: str) -> None:
    body = {"model": "gpt", "messages": [*ASKED, *history], "tools": [NOW], "max_tokens": 1}
    if len(json.dumps(body)) < 2000:
        chat.post("/chat/completions", cast_to=object, body=body)
        told: Any = chat.post("/../tokenize", cast_to=object, body=body)
        text: Any = chat.post(
            "/../detokenize", cast_to=object, body={"model": "gpt", "tokens": told["tokens"]}
        )
        assert expected in text["prompt"].split("the weather?", 1)[1]
    else:
        with pytest.raises(sdk.BadRequestError, match=r"positions|bytes"):
            chat.post("/chat/completions", cast_to=object, body=body)


def test_a_cut_call_is_sent_back(chat: OpenAI) -> None:
    options: Any = {"model": "gpt", "tools": TOOLS, "tool_choice": "required", "seed": 4}
    for limit in (10, 20, 30):
        cut = chat.chat.completions.create(messages=ASKED, max_tokens=limit, **options).choices[0]
        assert cut.finish_reason == "length"
        assert not cut.message.content  # no markup of a call without a name
        messages = [*ASKED, cut.message, {"role": "user", "content": "Again."}]
        assert chat.chat.completions.create(messages=messages, **options).choices


@pytest.mark.parametrize("seed", quick_only(range(6), (0, 1)))
def test_tools_go_with_a_format(chat: OpenAI, seed: int) -> None:
    """An answer is calls, or a text of the schema."""
    options: dict[str, Any] = {"tools": TOOLS, "response_format": FORMAT, "seed": seed, "n": 4}
    whole = chat.chat.completions.create(
        model="gpt", messages=ASKED, max_tokens=400, temperature=2, **options
    )
    for choice in whole.choices:
        if choice.message.tool_calls:
            assert choice.message.content is None and choice.finish_reason == "tool_calls"
            require_valid(choice.message.tool_calls)
        else:
            assert conforms(choice.message.content) and choice.finish_reason == "stop"
    none = chat.chat.completions.create(
        model="gpt", messages=ASKED, tool_choice="none", max_tokens=400, **options
    )
    assert all(conforms(choice.message.content) for choice in none.choices)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_never_called(chat: OpenAI, form: Format, mode: str) -> None:
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    found = chat.chat.completions.create(
        model="gpt",
        messages=ASKED,
        tools=TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        n=4,
        max_tokens=300,
        logit_bias={str(byte_id("{")): -100} if mode == "auto" and form is LLAMA else {},
    )
    for choice in found.choices:
        names = {call.function.name for call in choice.message.tool_calls or []}  # type: ignore[union-attr]
        assert names == ({"now"} if mode == "required" else set())


def test_a_tool_that_cannot_be_enforced_does_not_refuse_the_chat(chat: OpenAI) -> None:
    odd = {**NOW, "function": {"name": "odd", "parameters": {"not": {}, "uniqueItems": True}}}
    for choice in ("auto", "required"):
        assert chat.chat.completions.create(
            model="gpt",
            messages=ASKED,
            tools=[odd, NOW],  # type: ignore[list-item]
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=5,
        ).choices
    strict = {**odd, "function": {**odd["function"], "strict": True}}
    with pytest.raises(sdk.BadRequestError, match=r"tools\[1\].function.name 'odd'.*: not"):
        chat.chat.completions.create(
            model="gpt",
            messages=ASKED,
            tools=[NOW, strict],  # type: ignore[list-item]
            tool_choice="auto",
        )


def test_the_bound_of_all_schemas_is_named(chat: OpenAI) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 90]} for i in range(90)}}
    tools: Any = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(60)
    ]
    with pytest.raises(sdk.BadRequestError, match="without descriptions, exceed 500,000"):
        chat.chat.completions.create(model="gpt", messages=ASKED, tools=tools)


def test_a_tool_cannot_open_a_turn(byte_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    tokenizer.add_special_tokens(["<|user|>"])
    chat = ChatTokenizer(ChatTemplate(chat_template(HERMES)), tokenizer, 10_000)
    hostile = {
        "type": "function",
        "function": {"name": "f", "parameters": {"<|user|>": "<|user|>"}},
    }
    ids = chat.ids(ASKED, tools=[hostile])
    assert ids.count(tokenizer.token_to_id("<|user|>")) == 1
    assert BREAK not in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "Input should be 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "pattern",
        ),
        ({"tools": [NOW, NOW]}, "tools", "same name"),
        ({"tools": [NOW] * 129}, "tools", "at most 128"),
        ({"tools": None, "tool_choice": "required"}, None, "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "then"}}},
            None,
            "no tool is called 'then'",
        ),
        ({"tool_choice": "always"}, "tool_choice", "should be 'auto', 'none', 'required', or"),
        ({"guided_regex": "a"}, None, "guided_regex and tools exclude"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice.allowed_tools.mode",
            "Input should be 'auto'",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)
def test_a_mistake_is_named(
    chat: OpenAI, changes: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"model": "gpt", "messages": ASKED, "tools": TOOLS} | changes
    with pytest.raises(sdk.BadRequestError, match=message) as raised:
        chat.post("/chat/completions", cast_to=object, body=body)
    told = raised.value.param
    assert told == param or (told or "").startswith(f"{param}.")


def test_a_template_without_tools_refuses_them(
    server: TritonServer, openai: OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changes = with_chat_template(server, PLAIN, tmp_path_factory.mktemp("plain"))
    with opened(server, **changes) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        with pytest.raises(sdk.BadRequestError, match="does not use a tool call format") as raised:
            client.chat.completions.create(model="gpt", messages=ASKED, tools=TOOLS)
        assert raised.value.param == "tools"
        assert client.chat.completions.create(
            model="gpt", messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=1
        ).choices
    with pytest.raises(sdk.BadRequestError, match="tools is not supported"):
        openai.post(
            "/completions", cast_to=object, body={"model": "gpt", "prompt": "x", "tools": TOOLS}
        )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            '{% if tools %}<tool_call>{\\"name\\": x, \\"arguments\\": y}</tool_call>{% endif %}',
            HERMES,
        ),
        ('{% if tools %}{"name": n, "parameters": d}{% endif %}', LLAMA),
        ('{% if tools %}<tool_call>\n<function=f> "arguments"{% endif %}', None),
        ('{% if tools %}<tool_call>f\n<arg_key>k "arguments"{% endif %}', None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
        ('{{ messages }} <tool_call> "arguments"', None),
        ("", None),
    ],
)
def test_a_format_is_known_by_its_template(template: str, expected: Format | None) -> None:
    assert call_format_for(template) == expected


TEXTS = [
    (
        HERMES,
        'Let me see. \n<tool_call>\n{"name": "f", "arguments": {"a": "} </tool_call>", "b": {}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "g-h", "arguments": {}}\n</tool_call>\n',
        "stop",
        ("Let me see.", [("f", '{"a": "} </tool_call>", "b": {}}'), ("g-h", "{}")]),
    ),
    (
        LLAMA,
        '{"name": "f", "parameters": {"a": "}; x", "b": {}}}; {"name": "g-h", "parameters": {}}',
        "stop",
        (None, [("f", '{"a": "}; x", "b": {}}'), ("g-h", "{}")]),
    ),
    (HERMES, "5 < 6 <tool \n", "length", ("5 < 6 <tool \n", [])),
    (HERMES, "5 < 6 <tool", "stop", ("5 < 6 <tool", [])),
    (HERMES, "  ", "stop", ("  ", [])),
    (HERMES, "x \n", "length", ("x \n", [])),
    (LLAMA, 'See {"name": "f"} \n', "stop", ('See {"name": "f"} \n', [])),
    (LLAMA, "", "stop", ("", [])),
    # JSON that is no call.
    (LLAMA, '{"name": 5}', "stop", ('{"name": 5}', [])),
    (LLAMA, '{"name": "fg", "parameters": {}}', "stop", ('{"name": "fg", "parameters": {}}', [])),
    (HERMES, '{"a": " <tool_call>"}', "stop", ('{"a": " <tool_call>"}', [])),
    # Cut within the arguments, and within what precedes them.
    (
        LLAMA,
        '{"name": "f", "parameters": {"a": {"b": 1}',
        "length",
        (None, [("f", '{"a": {"b": 1}')]),
    ),
    (
        HERMES,
        'x \n<tool_call>\n{"name": "f", "arguments": {"a": 1',
        "length",
        ("x", [("f", '{"a": 1')]),
    ),
    (HERMES, '<tool_call>\n{"na', "length", ("", [])),
    (HERMES, "So: \n<tool_", "length", ("So:", [])),
    (HERMES, 'So:<tool_call>\n{"name": "f", "argu', "timeout", ("So:", [])),
    (LLAMA, '{"name": "f", "para', "length", ("", [])),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g-',
        "length",
        (None, [("f", "{}")]),
    ),
]


@pytest.mark.parametrize(("form", "text", "reason", "expected"), TEXTS)
def test_a_text_is_read_the_same_however_it_is_cut(
    form: Format, text: str, reason: FinishReason, expected: Any
) -> None:
    draw = random.Random(0)
    cuts = [
        draw.sample(range(len(text) + 1), draw.randint(0, min(9, len(text)))) for _ in range(99)
    ]
    for places in ([], list(range(len(text))), *map(sorted, cuts)):
        reader, edges = CallReader(form, ["f", "g-h"]), [0, *places, len(text)]
        deltas = []
        for number, (start, end) in enumerate(pairwise(edges)):
            deltas += reader.add(text[start:end], reason if number == len(edges) - 2 else "")
        message = merge_deltas(deltas)
        calls = [c["function"] for c in message.get("tool_calls", [])]
        assert message["content"] == expected[0]
        assert [(c["name"], c["arguments"]) for c in calls] == expected[1]
        assert reader.calls == len(calls)
