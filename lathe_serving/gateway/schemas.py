"""Tools' parameter schemas as a grammar can enforce them.

llguidance supports a part of JSON Schema. What it cannot enforce, for example `uniqueItems` or a
`pattern` with look-ahead, is dropped: the arguments may then violate it. `python -m
lathe_serving.gateway.schemas` is the process of `ToolSchemas`, which reads lists of schemas.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.generation import Json
from lathe_serving.gateway.slots import Turns
from lathe_serving.runtime.grammar_compiler import (
    JSON_OPTIONS,
    LimitedProcess,
    LimitExceeded,
    answer_lines,
    llguidance,
)

log = logging.getLogger("lathe")

MAX_CACHED, MAX_CACHED_CHARACTERS = 512, 64 * 1024  # schemas, and the size of one

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""

ANNOTATIONS = {
    *("$comment", "$schema", "default", "deprecated", "description", "example", "examples"),
    *("readOnly", "title", "writeOnly", "x-guidance"),
}
"""Keywords without an effect on what is valid, and llguidance's own options."""

DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose values are schemas: objects of them, lists, and one."""


class ToolSchemas:
    """Checks the schemas of tools, and remembers the results."""

    def __init__(self) -> None:
        self._process = LimitedProcess("lathe_serving.gateway.schemas", dict)
        self._turns = Turns(1)
        self._known: dict[str, tuple[Json, list[str]]] = {}

    async def enforceable(self, tools: Sequence[Json]) -> list[Json]:
        """The tools with the part of their schemas that a grammar can enforce.

        Args:
            tools: as in the OpenAI API.

        Raises:
            ApiError: a tool is strict, but its schema cannot be enforced; the schemas take too
                long; or too many requests are waiting.
        """
        given = [tool["function"].get("parameters") or NOTHING for tool in tools]
        texts = [json.dumps(schema) for schema in given]
        known = {text: self._known[text] for text in texts if text in self._known}
        if new := {text: s for text, s in zip(texts, given, strict=True) if text not in known}:
            results = await self._check(list(new.values()))
            known |= zip(new, results, strict=True)
            self._known |= {t: known[t] for t in new if len(t) <= MAX_CACHED_CHARACTERS}
            for old in list(self._known)[: max(0, len(self._known) - MAX_CACHED)]:
                del self._known[old]
        checked = []
        for number, (tool, text) in enumerate(zip(tools, texts, strict=True)):
            schema, dropped = known[text]
            where = f"tools[{number}].function.name {tool['function']['name']!r}"
            if dropped and tool["function"].get("strict"):
                what = f"{where}: strict is true, but its parameters cannot be enforced: "
                param = f"tools[{number}].function.parameters"
                raise ApiError(400, f"{what}{'; '.join(dropped)}", param, "unsupported_schema")
            if dropped and text in new:
                log.warning("%s: not enforced: %s", where, "; ".join(dropped))
            checked.append({**tool, "function": {**tool["function"], "parameters": schema}})
        return checked

    async def _check(self, schemas: list[Json]) -> list[tuple[Json, list[str]]]:
        try:
            found = await self._turns.run(
                "a check of their tools", lambda: self._process.ask(schemas)
            )
        except LimitExceeded as error:
            raise ApiError(400, f"tools: the schemas are {error}", param="tools") from None
        return [(schema, dropped) for schema, dropped in found]

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._turns.close()


def enforceable(schema: Json) -> tuple[Json, list[str]]:
    """The part of a schema that a grammar can enforce, and descriptions of what was dropped."""
    try:
        schema = _plain(schema)
        if not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref"}:
            schema = {"type": "object", **schema}
        if _error(schema) is None:
            return schema, []
        dropped = list[str]()
        schema = _repaired(schema, {k: schema[k] for k in DEFINITIONS if k in schema}, dropped)
        _, warnings = _validate(schema, is_lenient=True)
    except RecursionError:
        return {"type": "object"}, ["nested too deeply"]
    schema = {**(schema or {"type": "object"}), "x-guidance": {**JSON_OPTIONS, "lenient": True}}
    return schema, dropped + [note for warning in warnings for note in _keywords(warning)]


def _plain(schema: Any) -> Any:
    """A copy without annotations."""
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if plain.get("uniqueItems") is False:
        del plain["uniqueItems"]
    for container, key in _subschemas(plain):
        container[key] = _plain(container[key])
    return plain


def _subschemas(schema: Json) -> Iterator[tuple[Any, Any]]:
    """The containers of the schemas in a schema, which are copied, and their keys in these."""
    for keyword in (*NAMED, *LISTED, *SINGLE):
        value = schema.get(keyword)
        if keyword in NAMED and isinstance(value, dict):
            schema[keyword] = dict(value)
            yield from ((schema[keyword], key) for key in value)
        elif keyword in LISTED and isinstance(value, list):
            schema[keyword] = list(value)
            yield from ((schema[keyword], i) for i in range(len(value)))
        elif keyword in SINGLE and isinstance(value, dict):
            yield schema, keyword


def _repaired(schema: Any, definitions: Json, dropped: list[str]) -> Any:
    """The schema without what llguidance rejects even if it is lenient, from the inside out."""

    def error(changed: Any) -> str | None:
        return _error({**definitions, **changed}, is_lenient=True)

    if not isinstance(schema, dict) or error(schema) is None:
        return schema
    for container, key in _subschemas(schema):
        container[key] = _repaired(container[key], definitions, dropped)
    for keyword in [*schema]:
        if keyword not in DEFINITIONS and (why := error({keyword: schema[keyword]})) is not None:
            dropped.append(f"{keyword}: {why}")
            del schema[keyword]
    why = error(schema)
    if why is None:
        return schema
    # Keywords that contradict each other, such as a minimum above the maximum.
    for keyword in schema:
        rest = {key: value for key, value in schema.items() if key != keyword}
        if keyword not in ("type", "properties", *DEFINITIONS) and error(rest) is None:
            dropped.append(f"{keyword}: {why}")
            return rest
    dropped.append(why)
    return {}


def _error(schema: Any, is_lenient: bool = False) -> str | None:
    failed, messages = _validate(schema, is_lenient)
    return " ".join(messages[0].split()) if failed else None


def _validate(schema: Json, is_lenient: bool) -> tuple[bool, list[str]]:
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    grammar = {"grammars": [{"json_schema": {**schema, "x-guidance": options}}]}
    found: tuple[bool, list[str]] = llguidance().LLMatcher.validate_grammar_with_warnings(
        json.dumps(grammar)
    )
    return found


def _keywords(warning: str) -> list[str]:
    """The keywords of one of llguidance's warnings."""
    if match := re.fullmatch(r"Unimplemented keys: (\[.*\])", warning):
        return [str(keyword) for keyword in json.loads(match[1])]
    return [re.sub("^Unknown format: ", "format: ", warning)]


if __name__ == "__main__":
    answer_lines(lambda _: lambda schemas: [enforceable(schema) for schema in schemas])
