"""Tool calls: the grammar that a chat template's own format makes of the tools, and its reader.

Two formats are known, by what the template says: Hermes's and Qwen's,

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

and that of Llama 3, `{"name": "f", "parameters": {"x": 1}}`. A grammar holds the model to the
format, to the names and to the schemas of the arguments, also where it may choose to say something
else instead. So its reader may rely on where the blanks are; and since a JSON text has neither line
breaks nor quotes within its strings, the end of the arguments is the next place where these follow.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lathe.serve.gateway.answers import Json
from lathe.serve.runtime.grammar import JSON_OPTIONS

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""

OTHERS = ("<function=", "<arg_key>")
"""Markers of templates whose calls are in XML, also within `<tool_call>`."""


@dataclass(frozen=True)
class Format:
    """A tool call format.

    Attributes:
        opening: before the JSON object; where it is empty, a text that begins with `{` is a call.
        key: of the arguments.
        closing: after the JSON object.
        between: two calls.
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
def format_of(template: str) -> Format | None:
    """The format of a chat template's tool calls; None if it has none, or another one."""
    if not re.search(r"\btools\b", template) or any(other in template for other in OTHERS):
        return None
    for known in (HERMES, LLAMA):
        if known.opening.strip() in template and re.search(rf'"{known.key}\\?"', template):
            return known
    return None


def grammar_of(
    call_format: Format, tools: Sequence[Json], may_reply: bool, may_call_more: bool
) -> str:
    """A grammar of texts that call tools, in llguidance's Lark.

    Args:
        tools: that may be called, as in OpenAI's interface.
        may_reply: whether the text may have other words, or no call at all.
        may_call_more: whether it may have several calls.
    """
    rules = [f"one: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = {**(function.get("parameters") or NOTHING), "x-guidance": JSON_OPTIONS}
        head = json.dumps(call_format.head(function["name"]))
        rules.append(f'call{number}: {head} %json {json.dumps(schema)} "}}"')
    opening, closing = (
        json.dumps(text) if text else "" for text in (call_format.opening, call_format.closing)
    )
    more = f"({json.dumps(call_format.between)} call)*" if may_call_more else ""
    if not may_reply:
        rules += [f"start: call {more}", f"call: {opening} one {closing}"]
    elif call_format.opening:
        rules += [
            "start: call* TEXT" if may_call_more else "start: TEXT | call",
            "TEXT: /(.|\\n)*/",
            f"begun[lazy]: TEXT {json.dumps(call_format.trigger)}",
            f'call: begun "\\n" one {closing}',
        ]
    else:
        rules += [f"start: TEXT | call {more}", "TEXT: /([^{](.|\\n)*)?/", "call: one"]
    return "\n".join(rules)


class TextReader:
    """Reads a text in which nothing is called."""

    calls = 0

    def add(self, text: str, is_last: bool) -> list[Json]:
        """See `CallReader`."""
        return [{"content": text}] if text else []


class CallReader:
    """Divides a text, as it comes, into what is said and what is called."""

    def __init__(self, call_format: Format) -> None:
        self._form = call_format
        self._head = re.compile(r'(?:; )?\s*\{"name": "([\w-]+)", "' + call_format.key + '": ')
        self._end = "}" + (call_format.closing or call_format.between + '{"name": "')
        self._text = ""  # what is not understood yet
        self._step: Callable[[bool], Iterator[Json]] = self._read_text
        self._arguments = ""
        self._is_begun = False
        self.calls = 0

    def add(self, text: str, is_last: bool) -> list[Json]:
        """OpenAI's deltas for the next piece of the text.

        Args:
            is_last: whether it is the last piece.
        """
        self._text += text
        found: list[Json] = []
        step = None
        while step != self._step:
            step = self._step
            found += step(is_last)
        return found

    def _read_text(self, is_last: bool) -> Iterator[Json]:
        trigger = self._form.trigger
        may_call = bool(self._form.opening) or not self._is_begun
        self._is_begun |= bool(self._text)
        place = self._text.find(trigger) if may_call else -1
        if place == 0 or (place > 0 and self._form.opening):
            said, self._text = self._text[:place].rstrip(), self._text[place:]
            self._text = self._text.removeprefix(self._form.opening.strip())
            self._step = self._read_marker
        else:
            held = 0 if is_last or not self._form.opening else self._partial_marker(trigger)
            said, self._text = self._text[: len(self._text) - held], self._text[-held:] * bool(held)
        if said.strip() or (said and not self.calls and self._step == self._read_text):
            yield {"content": said}

    def _read_marker(self, is_last: bool) -> Iterator[Json]:
        if found := self._head.match(self._text):
            self._text, self._arguments = self._text[found.end() :], ""
            self._step = self._read_call
            function = {"name": found[1], "arguments": ""}
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            yield {"tool_calls": [{"index": self.calls, **call}]}
            self.calls += 1
        elif is_last:  # it is cut short
            yield {"content": self._form.opening.strip() + self._text}

    def _read_call(self, is_last: bool) -> Iterator[Json]:
        place = self._text.find(self._end)
        if place >= 0:
            part, self._text = self._text[:place], self._text[place + len(self._end) :]
            if not self._form.closing:
                self._text = '{"name": "' + self._text
            self._step = self._read_text if self._form.opening else self._read_marker
        elif is_last:
            part, self._text = self._text, ""
            if part.endswith("}") and _is_json(self._arguments + part[:-1]):
                part = part[:-1]
        else:
            held = self._partial_marker(self._end)
            part, self._text = self._text[: len(self._text) - held], self._text[-held:] * bool(held)
        self._arguments += part
        if part:
            call = {"index": self.calls - 1, "function": {"arguments": part}}
            yield {"tool_calls": [call]}

    def _partial_marker(self, marker: str) -> int:
        """The length of the text's end that may be the beginning of a marker, with the blanks
        before it."""
        sizes = range(min(len(marker) - 1, len(self._text)), 0, -1)
        size = next((n for n in sizes if self._text.endswith(marker[:n])), 0)
        return len(self._text) - len(self._text[: len(self._text) - size].rstrip())


def message_of(deltas: Iterable[Json]) -> Json:
    """The whole message that deltas make."""
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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
