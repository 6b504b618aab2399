"""Behaviour that clients know from transformers and from OpenAI's reference, as tables."""

import re
from collections.abc import Iterator
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lathe_serving.gateway.template import ChatTemplate, PromptError
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_chat import MESSAGES, TEMPLATE
from tests.support.gateways import opened, with_chat_template

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
TEMPLATES = {
    "ChatML": CHATML,
    "trimmed": TRIMMED,
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}",
    "split": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
}
CONTINUED = ["", " ", "It is", "It is ", "It is\n\n", " It is", "Hi", "<|im_end|>", "a</think> b"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("begun", CONTINUED)
def test_an_answer_is_continued_as_by_transformers(
    byte_tokenizer: Tokenizer, template: str, begun: str
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    options: Any = {"chat_template": TEMPLATES[template], "tokenize": False}
    ours = ChatTemplate(TEMPLATES[template])
    try:
        expected = theirs.apply_chat_template(messages, continue_final_message=True, **options)
    except ValueError:
        with pytest.raises(PromptError, match="omits parts of the final message"):
            ours.render(messages, continue_final_message=True)
    else:
        assert ours.render(messages, continue_final_message=True) == expected


def test_a_message_that_the_template_omits_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    with pytest.raises(PromptError, match="omits parts of the final message"):
        template.render(messages, continue_final_message=True)


@pytest.fixture(scope="module")
def chat(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    changes = with_chat_template(server, TEMPLATE, tmp_path_factory.mktemp("chat"))
    with opened(server, **changes) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=30)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_a_chat_has_as_many_top_logprobs_as_were_requested(chat: OpenAI, count: int) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": count, "temperature": 2}
    options |= {"model": "gpt", "messages": MESSAGES, "max_tokens": 20, "seed": 1}
    whole = chat.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None and whole.content
    assert {len(token.top_logprobs) for token in whole.content} == {count}
    streamed = [
        token
        for piece in chat.chat.completions.create(**options, stream=True)
        if piece.choices[0].logprobs
        for token in piece.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content
    if count == 1:  # some tokens were not the most probable one, which is listed
        assert any(token.logprob < token.top_logprobs[0].logprob for token in whole.content)


IGNORED: list[dict[str, Any]] = [
    {"reasoning_effort": "high"},
    {"reasoning_effort": "minimal", "verbosity": "low"},
    {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
    {"prompt_cache_key": "x", "safety_identifier": "y"},
]


@pytest.mark.parametrize("fields", IGNORED)
def test_fields_without_an_effect_are_ignored(chat: OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "gpt", "messages": MESSAGES, "temperature": 0}
    options["max_tokens"] = 9
    expected = chat.chat.completions.create(**options).choices
    assert chat.chat.completions.create(**options, **fields).choices == expected


@pytest.mark.parametrize(
    ("path", "changes", "param", "message"),
    [
        ("completions", {"prompt": [400]}, "prompt", "^prompt: 400 is outside"),
        ("completions", {"prompt": "x", "n": 9}, "n", "^n 9 exceeds"),
        ("completions", {"prompt": "x", "best_of": 9}, "best_of", "^best_of 9 exceeds"),
        ("completions", {"prompt": "x", "stop_token_ids": [400]}, "stop_token_ids", "400"),
        ("completions", {"prompt": "x", "guided_regex": "["}, "guided_regex", "^guided_regex"),
        ("chat/completions", {"tool_choice": {"type": "x"}}, "tool_choice", "'auto'"),
        ("chat/completions", {"tools": [{"type": "mcp"}]}, "tools[0].type", "'function'"),
    ],
)
def test_an_error_names_the_clients_field(
    chat: OpenAI, path: str, changes: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "gpt", **({"messages": MESSAGES} if "chat" in path else {}), **changes}
    with pytest.raises(sdk.BadRequestError) as raised:
        chat.post(f"/{path}", cast_to=object, body=body)
    assert raised.value.param is not None and raised.value.param.startswith(param)
    told: Any = raised.value.body
    assert re.search(message, told["message"]), told["message"]
    for name in ("input_ids", "num_return_sequences", "structured_outputs", "literal["):
        assert name not in told["message"] and name not in raised.value.param
