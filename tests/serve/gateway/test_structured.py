"""Structured output of a model with random weights on a real server."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai as sdk
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from lathe_serving.client import Client
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_chat import MESSAGES, TEMPLATE
from tests.support.constraints import GRAMMAR, REGEX, SCHEMA
from tests.support.gateways import opened, with_chat_template

FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
}
HELLO: dict[str, Any] = {"model": "gpt", "prompt": "hello", "max_tokens": 900}


@pytest.fixture(scope="module")
def chat(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with opened(
        server, **with_chat_template(server, TEMPLATE, tmp_path_factory.mktemp("chat"))
    ) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60)


def conforms(text: str | None) -> bool:
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_chat_follows_a_schema(chat: OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {"messages": MESSAGES, "temperature": temperature, "seed": 1, "n": 3}
    whole = chat.chat.completions.create(model="gpt", **options, response_format=FORMAT)
    texts = [choice.message.content for choice in whole.choices]
    assert all(map(conforms, texts))
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    streamed = {0: "", 1: "", 2: ""}
    for piece in chat.chat.completions.create(
        model="gpt", **options, response_format=FORMAT, stream=True
    ):
        streamed[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_the_sdk_parses_into_a_class(chat: OpenAI) -> None:
    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")

        name: str = Field(max_length=9)
        ages: list[int] = Field(max_length=2)

    found = chat.chat.completions.parse(model="gpt", messages=MESSAGES, response_format=Person)
    assert isinstance(found.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("response_format", FORMAT, conforms),
        ("structured_outputs", {"json": SCHEMA}, conforms),
        ("structured_outputs", {"json": json.dumps(SCHEMA), "regex": None}, conforms),
        ("structured_outputs", {"regex": REGEX}, re.compile(REGEX).fullmatch),
        ("structured_outputs", {"choice": ["a b", "c"]}, {"a b": 1, "c": 1}.get),
        ("structured_outputs", {"grammar": GRAMMAR}, re.compile(r"[(\[]+x[)\]]+").fullmatch),
        ("guided_json", SCHEMA, conforms),
        ("guided_regex", REGEX, re.compile(REGEX).fullmatch),
        ("guided_choice", ["a b", "c"], {"a b": 1, "c": 1}.get),
        ("guided_grammar", GRAMMAR, re.compile(r"[(\[]+x[)\]]+").fullmatch),
    ],
)
def test_a_completion_follows_what_vllm_calls_it(
    openai: OpenAI, name: str, value: Any, expected: Any
) -> None:
    found = openai.completions.create(**HELLO, n=2, extra_body={name: value})
    assert all(expected(choice.text) for choice in found.choices), found.choices


def test_a_json_object_is_one(openai: OpenAI) -> None:
    extra = {"response_format": {"type": "json_object"}, "logit_bias": {}}
    for seed in range(8):
        (choice,) = openai.completions.create(**HELLO, seed=seed, extra_body=extra).choices
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":  # a model with random weights may nest without end
            assert isinstance(json.loads(choice.text), dict)


def test_log_probabilities_and_an_echo_are_as_without(openai: OpenAI) -> None:
    extra = {"guided_regex": "[a-z]{5}", "logprobs": 1, "echo": True}
    (choice,) = openai.completions.create(**HELLO, seed=0, extra_body=extra).choices
    assert re.fullmatch("hello[a-z]{5}", choice.text)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == 10
    assert min(choice.logprobs.token_logprobs[5:]) < -5  # ignores the grammar


def test_triton_takes_it_too(client: Client) -> None:
    found = client.generate("x", structured_outputs=json.dumps({"json": SCHEMA}), max_tokens=900)
    assert conforms(found.text) and found.finish_reason == "stop"


def test_any_format_that_says_nothing_changes_nothing(openai: OpenAI) -> None:
    plain = openai.completions.create(**HELLO | {"max_tokens": 9}, temperature=0).choices
    for extra in ({"response_format": {"type": "text"}}, {"response_format": None}):
        found = openai.completions.create(
            **HELLO | {"max_tokens": 9}, temperature=0, extra_body=extra
        )
        assert found.choices == plain


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            'Unimplemented keys: \\["not"\\]',
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Field required",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "give one of"),
        ({"guided_regex": "["}, "guided_regex", "guided_regex: .*invalid regex"),
        ({"guided_choice": []}, "guided_choice", "guided_choice: choice must be a list"),
        ({"guided_choice": [1]}, "guided_choice[0]", "valid string"),
        ({"guided_grammar": "x" * 500_000}, "guided_grammar", "out of range"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            None,
            "response_format and guided_regex exclude each other",
        ),
    ],
)
def test_unsupported_constraints_are_named(
    openai: OpenAI, is_stream: bool, given: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=message) as raised:
        openai.post("/completions", cast_to=object, body=HELLO | given | {"stream": is_stream})
    assert raised.value.param == param
