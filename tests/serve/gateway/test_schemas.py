"""What a grammar enforces of tools' schemas, and what becomes of the rest."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe_base.parameters import MAX_CONSTRAINT_CHARACTERS
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.tools import (
    HERMES,
    LLAMA,
    CallReader,
    ToolSchemas,
    enforceable,
    merge_deltas,
    tool_grammar,
)
from lathe_serving.runtime.grammar import Grammars
from tests.support.mcp_tools import SERVERS, TOOLS

DROPPED = {
    "slack_add_reaction": {"pattern"},
    "explain_query": {"uniqueItems"},
    "API-post-page": {"oneOf", "propertyNames", "format"},
    "API-get-comments": {"if", "then", "not", "dependentRequired"},
}


@pytest.fixture(scope="module")
def grammars(byte_tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(byte_tokenizer, 260, [256])
    yield made
    made.close()


def without(schema: Any, dropped: set[str]) -> Any:
    """The schema without keywords."""
    if isinstance(schema, dict):
        return {k: without(v, dropped) for k, v in schema.items() if k not in dropped}
    return [without(one, dropped) for one in schema] if isinstance(schema, list) else schema


def written(grammars: Grammars, tokenizer: Tokenizer, seed: int, **constraint: Any) -> str:
    """A random text, which ends soon because it prefers to close what is open."""
    grammar = grammars.start(json.dumps(constraint), [])
    rng, ids = np.random.default_rng(seed), list[int]()
    closing = [tokenizer.token_to_id(letter) for letter in '"}]']
    while (allowed := grammar.allowed()) is not None and not allowed[256]:
        choice = [i for i in closing if allowed[i]]
        if not choice or rng.random() < 0.2:
            choice = np.flatnonzero(allowed).tolist()
        ids.append(int(rng.choice(choice)))
        grammar.add(ids[-1])
        assert len(ids) < 3000
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("server", SERVERS)
def test_mcp_servers_tools_are_called(
    grammars: Grammars, byte_tokenizer: Tokenizer, server: str
) -> None:
    functions = {tool["function"]["name"]: tool["function"] for tool in SERVERS[server]}
    schemas, checked = {}, []
    for name, function in functions.items():
        given = function.get("parameters") or {"type": "object", "maxProperties": 0}
        enforced, dropped = enforceable(given)
        keywords = DROPPED.get(name, set())
        assert {re.split("[: ]", note)[0] for note in dropped} == keywords
        schemas[name] = without(given, keywords)
        text = written(grammars, byte_tokenizer, 0, json=enforced)
        jsonschema.validate(json.loads(text), schemas[name])
        checked.append({"function": {"name": name, "parameters": enforced}})
    for form in (HERMES, LLAMA):
        grammar = tool_grammar(form, checked, False, True)
        text = written(grammars, byte_tokenizer, 1, grammar=grammar)
        for call in merge_deltas(CallReader(form, [*functions]).add(text, "stop"))["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[call["function"]["name"]])


def test_all_servers_at_once_compile(grammars: Grammars) -> None:
    many = json.loads(json.dumps(TOOLS))
    for tool in many:  # 2.4 kB each, as they come
        tool["function"]["description"] = "What it does, and when to use it. " * 60
    assert len(many) > 40 and len(json.dumps(many)) > 100_000
    tools = asyncio.run(checked(many))
    grammar = json.dumps({"grammar": tool_grammar(HERMES, tools, True, True)})
    assert len(grammar) < MAX_CONSTRAINT_CHARACTERS
    allowed = grammars.start(grammar, []).allowed()
    assert allowed is not None and np.count_nonzero(allowed) > 100


async def checked(tools: list[Any]) -> list[Any]:
    schemas = ToolSchemas()
    try:
        return await schemas.enforceable(tools)
    finally:
        schemas.close()


def one_tool(schema: Any, **more: Any) -> list[Any]:
    function = {"name": "search", "parameters": schema, **more}
    return [{"type": "function", "function": {"name": "first"}}, {"function": function}]


def properties(schema: Any) -> dict[str, Any]:
    ours = {"p": schema, "q": {"type": "integer"}}
    return {"type": "object", "properties": ours, "required": ["p"]}


NASTY = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "not": {"const": "x"}}, "not"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if; then"),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
    ({"type": "string", "pattern": "^(?!a)b"}, "pattern: .*look-around"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern: .*backreferences"),
    ({"type": "string", "pattern": "["}, "pattern: .*unclosed"),
    ({"type": "string", "format": "color"}, "format: color"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "any"}, "type: Invalid type: any"),
    ({"$ref": "https://example.com/schema.json"}, r"\$ref"),
    ({"$ref": "#/$defs/missing"}, r"\$ref"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum: Unsatisfiable"),
    (
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
        "required: Unsatisfiable",
    ),
    ({"enum": []}, "enum"),
]


@pytest.mark.parametrize(("schema", "keyword"), NASTY)
def test_what_cannot_be_enforced_is_dropped_unless_it_is_strict(
    grammars: Grammars, byte_tokenizer: Tokenizer, schema: Any, keyword: str
) -> None:
    for given in (schema, properties(schema)):
        assert re.search(keyword, "; ".join(enforceable(given)[1]))
    text = written(grammars, byte_tokenizer, 0, json=enforceable(given)[0])
    jsonschema.validate(json.loads(text), properties({}))  # the rest is enforced


def test_a_strict_tool_is_named_and_a_lenient_one_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        schemas = ToolSchemas()
        for schema, keyword in NASTY:
            with pytest.raises(ApiError, match=keyword) as raised:
                await schemas.enforceable(one_tool(properties(schema), strict=True))
            assert raised.value.status == 400
            assert raised.value.param == "tools[1].function.parameters"
            assert "tools[1].function.name 'search'" in raised.value.message
            assert "grammar" not in raised.value.message and len(raised.value.message) < 400
            caplog.clear()
            with caplog.at_level(logging.WARNING, "lathe"):
                tools = one_tool({**properties(schema), "title": keyword})
                assert await schemas.enforceable(tools) == await schemas.enforceable(tools)
        schemas.close()

    asyncio.run(ask())


@pytest.mark.slow
def test_a_schema_that_takes_too_much_is_refused_alone() -> None:
    patterns = [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(10, 30)]

    async def ask() -> None:
        schemas = ToolSchemas()
        tools = one_tool(properties({"type": "string", "allOf": patterns}))
        try:
            with pytest.raises(ApiError, match=r"too complex to compile in 1 s .* 256 MiB"):
                await schemas.enforceable(tools)
            assert await schemas.enforceable(TOOLS[:3])
        finally:
            schemas.close()

    asyncio.run(ask())


def test_a_client_that_leaves_does_not_disturb_the_next() -> None:
    async def ask() -> None:
        schemas = ToolSchemas()
        leaving = asyncio.create_task(schemas.enforceable(TOOLS[:1]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        found = await schemas.enforceable(one_tool({"not": {}}))
        assert found[1]["function"]["parameters"]["not"] == {}
        schemas.close()

    asyncio.run(ask())


def deep(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_may_be_nested() -> None:
    assert enforceable(deep(20))[1] == []
    assert enforceable(deep(900))[1] != []


def test_annotations_are_stripped_but_not_properties_of_their_names() -> None:
    annotated = {
        "type": "object",
        "title": "T",
        "description": "d" * 1000,
        "properties": {
            "description": {"type": "string", "description": "d", "default": "x"},
            "title": {"enum": ["a"], "examples": ["a"]},
            "data": {"const": {"title": "kept"}},
        },
        "required": ["title"],
    }
    assert enforceable(annotated) == (
        {
            "type": "object",
            "properties": {
                "description": {"type": "string"},
                "title": {"enum": ["a"]},
                "data": {"const": {"title": "kept"}},
            },
            "required": ["title"],
        },
        [],
    )
