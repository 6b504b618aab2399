"""/v1/responses with OpenAI's client, whose classes check what they are given."""

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai as sdk
import pytest
import requests
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from lathe_serving.gateway.chat import Chat
from lathe_serving.gateway.errors import ENDING, ApiError
from lathe_serving.gateway.tools import HERMES
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_tools import NOW, WEATHER, chat_template
from tests.support.constraints import SCHEMA
from tests.support.gateways import opened, with_chat_template

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
SCHEMAS = {tool["name"]: tool.get("parameters", {"maxProperties": 0}) for tool in TOOLS}


@pytest.fixture(scope="module")
def client(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    changes = with_chat_template(server, chat_template(HERMES), tmp_path_factory.mktemp("chat"))
    with opened(server, **changes) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60)


def test_an_answer_is_that_of_a_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="gpt",
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
    )
    found = client.responses.create(
        model="gpt",
        instructions="Be short.",
        input="Hi",
        temperature=0,
        max_output_tokens=9,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
        store=False,
    )
    Response.model_validate(found.model_dump(), strict=True)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage is not None and chat.usage is not None
    assert found.usage.total_tokens == chat.usage.total_tokens
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    ours = found.output[0].content[0].logprobs  # type: ignore[union-attr]
    theirs = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [one.logprob for one in ours or []] == [one.logprob for one in theirs or []]


def events(client: OpenAI, **options: Any) -> list[Any]:
    """The events of a stream; each is exactly what OpenAI's classes say."""
    body = options.pop("extra_body") | options | {"model": "gpt", "stream": True}
    with requests.post(f"{client.base_url}responses", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        pieces = reply.content.decode().strip().split("\n\n")
    told = []
    for number, piece in enumerate(pieces):
        kind, data = piece.split("\n")
        given = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {given['type']}" and given["sequence_number"] == number
        told.append(EVENTS.validate_python(given))
    return told


@pytest.mark.parametrize(
    "options",
    [
        {"input": "Hi", "max_output_tokens": 9},
        {"input": "Hi", "max_output_tokens": 9, "include": ["message.output_text.logprobs"]},
        {"input": "Hi", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 600},
        {"input": "Hi", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 12},
        {"input": "Hi", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 4},
    ],
)
def test_a_stream_is_the_whole_in_pieces(client: OpenAI, options: dict[str, Any]) -> None:
    seed: Any = {"extra_body": {"seed": 5}, "temperature": 0}
    whole = client.responses.create(model="gpt", **options, **seed)
    told = events(client, **options, **seed)
    assert [one.type for one in told[:2]] == ["response.created", "response.in_progress"]
    last = told[-1]
    assert last.type == f"response.{whole.status}"

    def plain(output: Any) -> Any:
        return [item.model_dump(exclude={"id", "call_id"}) for item in output]

    assert plain(last.response.output) == plain(whole.output)
    assert last.response.usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]
    done = [one.item for one in told if one.type == "response.output_item.done"]
    assert done == last.response.output
    for number, item in enumerate(last.response.output):
        mine = [one for one in told if getattr(one, "output_index", None) == number]
        parts = "".join(one.delta for one in mine if one.type.endswith(".delta"))
        is_call = item.type == "function_call"
        assert parts == (item.arguments if is_call else item.content[0].text)
        kinds = [one.type for one in mine if not one.type.endswith(".delta")]
        assert kinds == (
            [
                "response.output_item.added",
                "response.function_call_arguments.done",
                "response.output_item.done",
            ]
            if is_call
            else [
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
            ]
        )


def test_a_stream_that_fails_ends_with_its_event(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Chat.deltas

    async def cut(chat: Chat) -> AsyncGenerator[Any]:
        async for piece in whole(chat):
            yield piece
        raise ApiError(503, "the server is shutting down", code=ENDING)

    monkeypatch.setattr(Chat, "deltas", cut)
    told = events(client, input="Hi", max_output_tokens=9, extra_body={})
    assert [one.type for one in told].count("response.output_text.delta") > 0
    last = told[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message == "the server is shutting down"


def test_the_models_own_sampling_is_reported(server: TritonServer, tmp_path: Path) -> None:
    template = with_chat_template(server, chat_template(HERMES), tmp_path)
    with opened(server, **template, recommended={"temperature": 0.25}) as address:
        own = OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60)
        found = own.responses.create(model="gpt", input="Hi", max_output_tokens=2)
        stated = own.responses.create(model="gpt", input="Hi", max_output_tokens=2, temperature=1)
    assert (found.temperature, found.top_p, stated.temperature) == (0.25, 1.0, 1.0)


def test_tools_are_called_and_their_outputs_read(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "The weather?"}]}]
    found = client.responses.create(
        model="gpt", input=asked, tools=TOOLS, tool_choice="required", temperature=0
    )
    calls = [item for item in found.output if item.type == "function_call"]
    assert found.status == "completed" and calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        asked += [call.model_dump()]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"}
        for call in calls
    ]
    again = client.responses.create(
        model="gpt",
        input=[*asked, {"type": "reasoning", "id": "rs_1", "summary": []}, *outputs],
        tools=TOOLS,
        max_output_tokens=5,
    )
    chat = client.chat.completions.create(
        model="gpt",
        messages=[
            {"role": "user", "content": "The weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ],
            },
            *(
                {"role": "tool", "tool_call_id": call.call_id, "content": "5 degrees"}
                for call in calls
            ),
        ],  # type: ignore[list-item]
        tools=[WEATHER, NOW],  # type: ignore[list-item]
        max_tokens=1,
    )
    assert again.usage is not None and chat.usage is not None
    assert again.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "now"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
    ],
)
def test_only_chosen_tools_are_called(client: OpenAI, choice: Any) -> None:
    for seed in range(3):
        found = client.responses.create(
            model="gpt",
            input="Hi",
            tools=TOOLS,
            tool_choice=choice,
            extra_body={"seed": seed},
            parallel_tool_calls=False,
        )
        (call,) = found.output
        assert call.type == "function_call" and call.name == "now"
        assert json.loads(call.arguments) == {}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=9)
    ages: list[int] = Field(max_length=2)


def test_the_sdk_parses_into_a_class_and_follows_a_stream(client: OpenAI) -> None:
    whole = client.responses.parse(model="gpt", input="Hi", text_format=Person, temperature=0)
    assert isinstance(whole.output_parsed, Person)
    with client.responses.stream(
        model="gpt", input="Hi", text_format=Person, temperature=0
    ) as stream:
        assert {one.type for one in stream} >= {"response.output_text.delta"}
        assert stream.get_final_response().output_parsed == whole.output_parsed
    form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = client.responses.create(model="gpt", input="Hi", text={"format": form})
    Response.model_validate(found.model_dump(by_alias=True))
    assert found.text is not None and found.text.format.name == "x"  # type: ignore[union-attr]
    jsonschema.validate(json.loads(found.output_text), SCHEMA)


FORM = {"type": "json_schema", "name": "x"}
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "valid list"),
        ({"input": [{"role": "pilot", "content": "x"}]}, "input[0].role", "Input should be"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "Input should be 'input_text'",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "should be an object"),
        ({"input": "x" * 3000}, "input", "positions|bytes"),
        ({"input": "x", "max_output_tokens": 1020}, "input", "exceed the 1024 positions"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"input": "x", "background": True}, "background", "not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]", "object of type function"),
        (
            {"input": "x", "text": {"format": {"type": "grammar"}}},
            "text.format",
            "json_object, json_schema",
        ),
        ({"input": "x", "tool_choice": "required"}, None, "tool_choice needs tools"),
        (
            {"input": "x", "text": {"format": FORM | {"schema": {"not": {}}}}},
            "text.format",
            'text.format: Unimplemented keys: ."not"',
        ),
        (
            {"input": "x", "tools": [TOOL | {"strict": True, "parameters": {"not": {}}}]},
            "tools[0].function.parameters",
            r"tools\[0\].function.name 'f': strict is true, but .* cannot be enforced: not",
        ),
    ],
)
def test_a_mistake_is_named(
    client: OpenAI, changes: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=message) as raised:
        client.post("/responses", cast_to=object, body={"model": "gpt", **changes})
    assert raised.value.param == param
