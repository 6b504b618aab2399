"""Tool calls: what a grammar can enforce of the tools' schemas, the grammar of the chat template's
own format, and the parser of its output.

Two formats are supported, recognized by the template's text: Hermes's and Qwen's,

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

and that of Llama 3, `{"name": "f", "parameters": {"x": 1}}`. The grammar constrains the format, the
function names and the argument schemas, even if the model may reply with text instead. So the
parser can rely on the positions of blanks; and because JSON strings contain neither line breaks nor
unescaped quotes, the arguments end where these next occur.

llguidance supports a part of JSON Schema. What it cannot enforce, for example `uniqueItems` or a
`pattern` with look-ahead, is dropped: the arguments may then violate it. Some schemas take it very
long, so `python -m lathe_serving.gateway.tools` is the process of `ToolSchemas`, which reads lists
of schemas.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lathe_serving.gateway.errors import ApiError, Json
from lathe_serving.gateway.template import Turns
from lathe_serving.runtime.grammar_compiler import (
    JSON_OPTIONS,
    LimitedProcess,
    LimitExceeded,
    answer_lines,
    llguidance,
)
from lathe_serving.runtime.protocol import FinishReason

log = logging.getLogger("lathe")

OTHERS = ("<function=", "<arg_key>")
"""Markers of templates with XML calls, which may also use `<tool_call>`."""

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
        self._process = LimitedProcess("lathe_serving.gateway.tools", dict)
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
        schemas = [tool["function"].get("parameters") or NOTHING for tool in tools]
        texts = [json.dumps(schema) for schema in schemas]
        known = {text: self._known[text] for text in texts if text in self._known}
        if new := {text: s for text, s in zip(texts, schemas, strict=True) if text not in known}:
            try:
                results = await self._turns.run(
                    "a check of their tools", lambda: self._process.ask([*new.values()])
                )
            except LimitExceeded as error:
                raise ApiError(400, f"tools: the schemas are {error}", param="tools") from None
            for text, (schema, dropped) in zip(new, results, strict=True):
                known[text] = schema, dropped
            # Agents send the same tools with every turn; only large ones are checked each time.
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
            if dropped and text in new:  # once for each schema, not in every turn
                log.warning("%s: not enforced: %s", where, "; ".join(dropped))
            checked.append({**tool, "function": {**tool["function"], "parameters": schema}})
        return checked

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
        if _validate(schema)[0] is None:
            return schema, []
        # As it is, it is rejected. llguidance can be lenient and say what it ignores; but some
        # keywords it rejects even then, and these are removed first.
        dropped = list[str]()
        schema = _repaired(schema, {k: schema[k] for k in DEFINITIONS if k in schema}, dropped)
        _, warnings = _validate(schema, is_lenient=True)
    except RecursionError:
        return {"type": "object"}, ["nested too deeply"]
    schema = {**(schema or {"type": "object"}), "x-guidance": {**JSON_OPTIONS, "lenient": True}}
    for warning in warnings:
        if match := re.fullmatch(r"Unimplemented keys: (\[.*\])", warning):
            dropped += [str(keyword) for keyword in json.loads(match[1])]
        else:
            dropped.append(re.sub("^Unknown format: ", "format: ", warning))
    return schema, dropped


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
        return _validate({**definitions, **changed}, is_lenient=True)[0]

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


def _validate(schema: Json, is_lenient: bool = False) -> tuple[str | None, list[str]]:
    """llguidance's reason to reject a schema, None if it does not, and its messages."""
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    is_rejected, messages = llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(messages[0].split()) if is_rejected else None, messages


@dataclass(frozen=True)
class Format:
    """A tool call format.

    Attributes:
        opening: text before the JSON object; if empty, a text that begins with `{` is a call.
        key: that of the arguments.
        closing: text after the JSON object.
        between: text between two calls.
    """

    opening: str
    key: str
    closing: str
    between: str

    @property
    def trigger(self) -> str:
        """The text that begins a call."""
        return self.opening.strip() or "{"

    def head(self, name: str) -> str:
        """The JSON object up to its arguments."""
        return f'{{"name": "{name}", "{self.key}": '


HERMES = Format("<tool_call>\n", "arguments", "\n</tool_call>", "\n")
LLAMA = Format("", "parameters", "", "; ")


@lru_cache
def call_format_for(template: str) -> Format | None:
    """The format of a chat template's tool calls; None if it has no supported one."""
    if not re.search(r"\btools\b", template) or any(other in template for other in OTHERS):
        return None
    for known in (HERMES, LLAMA):
        if known.opening.strip() in template and re.search(rf'"{known.key}\\?"', template):
            return known
    return None


def tool_grammar(
    call_format: Format,
    tools: Sequence[Json],
    may_reply: bool,
    may_call_more: bool,
    reply_schema: Json | None = None,
) -> str:
    """A grammar for texts with tool calls, in llguidance's Lark.

    Args:
        tools: those that may be called, as in the OpenAI API, with schemas that
            `ToolSchemas.enforceable` returns.
        may_reply: whether other text, or no call at all, is allowed.
        may_call_more: whether several calls are allowed.
        reply_schema: the JSON Schema of a text without calls.
    """
    rules = [f"one: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        # A schema that had to be repaired brings options of its own, which replace these.
        schema = {"x-guidance": JSON_OPTIONS, **(function.get("parameters") or NOTHING)}
        head = json.dumps(call_format.head(function["name"]))
        rules.append(f'call{number}: {head} %json {json.dumps(schema)} "}}"')
    opening, closing = (
        json.dumps(text) if text else "" for text in (call_format.opening, call_format.closing)
    )
    more = f"({json.dumps(call_format.between)} call)*" if may_call_more else ""
    if not may_reply or reply_schema is not None:
        rules += [f"start: call {more}", f"call: {opening} one {closing}"]
        if may_reply:
            rules[-2] += " | reply"
            reply = json.dumps({**(reply_schema or {}), "x-guidance": JSON_OPTIONS})
            rules.append(f"reply: %json {reply}")
    elif call_format.opening:
        rules += [
            "start: call* TEXT" if may_call_more else "start: TEXT | call",
            "TEXT: /(.|\\n)*/",
            # Lazy: it ends with the first trigger, so that no text contains one without a call.
            f"begun[lazy]: TEXT {json.dumps(call_format.trigger)}",
            f'call: begun "\\n" one {closing}',
        ]
    else:
        rules += [f"start: TEXT | call {more}", "TEXT: /([^{](.|\\n)*)?/", "call: one"]
    return "\n".join(rules)


class CallReader:
    """Splits a streamed text into content and tool calls.

    Args:
        call_format: None if there are no calls in the text.
        names: of the tools that may be called.
    """

    def __init__(self, call_format: Format | None, names: Sequence[str] = ()) -> None:
        self._reads_calls = call_format is not None
        self._form = form = call_format or HERMES
        self._heads = {name: form.head(name) for name in names}
        # What ends the arguments: a brace and what follows it. In a format without a closing text,
        # that is the next call.
        self._end = "}" + (form.closing or form.between + '{"name": "')
        self._text = ""  # what is not understood yet
        self._step: Callable[[FinishReason], Iterator[Json]] = self._read_text
        self._arguments = ""
        self._may_call = True
        self.calls = 0

    def add(self, text: str, finish_reason: FinishReason) -> list[Json]:
        """OpenAI's deltas for the next chunk of the text.

        Args:
            finish_reason: empty unless it is the last chunk.
        """
        if not self._reads_calls:
            return [{"content": text}] if text else []
        self._text += text
        deltas: list[Json] = []
        # A step reads as far as it can; if it has changed the state, the next state reads on.
        step = None
        while step != self._step:
            step = self._step
            deltas += step(finish_reason)
        return deltas

    def _read_text(self, finish_reason: FinishReason) -> Iterator[Json]:
        trigger = self._form.trigger
        start = self._text.find(trigger) if self._may_call else -1
        if not self._form.opening:  # a call is the whole text
            self._may_call &= not self._text
        if start == 0 or (start > 0 and self._form.opening):
            said = self._text[:start].rstrip()
            self._step = self._read_head
        else:
            said = self._text[: len(self._text) - self._partial_marker(trigger)]
            is_marker = self._may_call and self._text[len(said) :].strip()
            if not self._may_call or finish_reason == "stop" or (finish_reason and not is_marker):
                said = self._text  # it is complete, or cut, but not within a marker
        self._text = self._text[len(said) :]
        if said.strip() or (said and not self.calls and self._step == self._read_text):
            yield {"content": said}

    def _read_head(self, finish_reason: FinishReason) -> Iterator[Json]:
        text = self._text.lstrip().removeprefix(self._form.opening.strip()).lstrip("; \n")
        for name, head in self._heads.items():
            if text.startswith(head):
                self._text, self._arguments = text.removeprefix(head), ""
                self._step = self._read_arguments
                function = {"name": name, "arguments": ""}
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                yield {"tool_calls": [{"index": self.calls, **call, "function": function}]}
                self.calls += 1
                return
        is_head = any(head.startswith(text) for head in self._heads.values())
        if not is_head or finish_reason == "stop":  # rather a text that begins alike
            yield {"content": self._text}
            self._text, self._may_call, self._step = "", False, self._read_text
        # A call that is cut within its head is no content.

    def _read_arguments(self, finish_reason: FinishReason) -> Iterator[Json]:
        start = self._text.find(self._end)
        if start >= 0:
            part, self._text = self._text[:start], self._text[start + len(self._end) :]
            if not self._form.closing:  # then the end was found by the head of the next call
                self._text = '{"name": "' + self._text
            self._step = self._read_text if self._form.opening else self._read_head
        elif finish_reason:
            part, self._text = self._text, ""
            # The last brace closes the call, unless the text was cut within the arguments.
            if part.endswith("}"):
                with suppress(ValueError, RecursionError):
                    json.loads(self._arguments + part[:-1])
                    part = part[:-1]
        else:
            partial = self._partial_marker(self._end)
            part, self._text = (
                self._text[: len(self._text) - partial],
                self._text[-partial:] * bool(partial),
            )
        self._arguments += part
        if part:
            call = {"index": self.calls - 1, "function": {"arguments": part}}
            yield {"tool_calls": [call]}

    def _partial_marker(self, marker: str) -> int:
        """The length of the text's suffix that may be the beginning of a marker, including
        preceding blanks."""
        sizes = range(min(len(marker) - 1, len(self._text)), 0, -1)
        size = next((n for n in sizes if self._text.endswith(marker[:n])), 0)
        return len(self._text) - len(self._text[: len(self._text) - size].rstrip())


def merge_deltas(deltas: Iterable[Json]) -> Json:
    """The complete message from its deltas."""
    said, calls = "", dict[int, Json]()
    for delta in deltas:
        said += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            known = calls.setdefault(call["index"], call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    message: Json = {"role": "assistant", "content": said, "refusal": None}
    if calls:
        listed = [{k: v for k, v in call.items() if k != "index"} for call in calls.values()]
        message |= {"content": said or None, "tool_calls": listed}
    return message


if __name__ == "__main__":
    answer_lines(lambda _: lambda schemas: [enforceable(schema) for schema in schemas])
