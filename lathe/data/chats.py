"""Conversations as training text: the model's chat template renders them, and marks say which part
of the text the assistant writes.

A document of such a corpus is the rendered text with `BEGIN` and `END` around everything that the
assistant writes, and with `BREAK` in what would be special tokens within messages; see
`lathe_serving.gateway.template`. So a conversation is read in training exactly as the server reads
it, whatever its messages contain.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lathe.data.chat_template import TEMPLATE, model_template
from lathe.data.fast_tokenizer import TokenBatch
from lathe.data.rows import checked_text
from lathe_base.config.settings import PrepareSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, parse_json
from lathe_base.storage import digest
from lathe_serving.runtime.text import bos_ids

BREAK, BEGIN, END = MARKS = "\ufdd0", "\ufdd1", "\ufdd2"
"""As in `lathe_serving.gateway.template`, which needs jinja2: only what renders imports it."""

KEYS = ("messages", "conversations", "prompt")
"""Keys of a row's conversation; the first that is there counts."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names for roles."""


class Chats:
    """Turns rows with conversations into documents: a `RowText`.

    Rows have one of these forms:

    - OpenAI's `messages`, a list of objects with `role` and `content`, also with `tool_calls`; and
      `tools`, a list, or a string with its JSON;
    - ShareGPT's `conversations`, a list of objects with `from` and `value`; and `system`, a string;
    - `prompt` and `completion`, each a string or a list of OpenAI's messages.

    Args:
        tokenizer: a checkpoint or Hugging Face model, or another folder with a tokenizer and a chat
            template; or the path of its `tokenizer.json`.
        loaded: that tokenizer.

    Raises:
        UserError: there is no chat template, or an invalid one.
    """

    example = '{"messages": [{"role": "user", "content": "..."}, ...]}'

    def __init__(self, tokenizer: Path, loaded: Tokenizer) -> None:
        from lathe_serving.gateway.template import ChatTemplate, ChatTokenizer, PromptError

        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        source = model_template(folder)
        if source is None:
            raise UserError(
                f"{folder}: no chat template, which Prepare.chat needs",
                "give the folder of a chat model as --tokenizer, or put its chat_template.jinja "
                "there; Prepare.chat=False reads the corpus as plain text",
                Code.NOT_FOUND,
            )
        self.source = source
        try:
            self._template = ChatTemplate(source)
        except PromptError as error:
            raise UserError(f"{folder}: {error}", "correct the template", Code.MALFORMED) from None
        self._tokenizer = ChatTokenizer(self._template, loaded, 0)
        self._error = PromptError
        special = "|".join(map(re.escape, self._tokenizer.special)) or "(?!)"
        self._ends = re.compile(rf"((?:{special})+)(?:\s|{special})*\Z")

    @cached_property
    def digest(self) -> str:
        """Digest of the template."""
        return digest(self.source)

    def save(self, folder: Path) -> None:
        """Write the template beside a data set's tokenizer."""
        (folder / TEMPLATE).write_text(self.source, encoding="utf-8")

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """See `RowText`."""
        if not {*KEYS} & {*names}:
            raise UserError(
                f"{where}: no conversations: no column messages, conversations or prompt among "
                f"{', '.join(map(repr, names[:8]))}",
                "rename the column of the conversations to messages, or set Prepare.chat=False",
                Code.MALFORMED,
            )
        return [name for name in names if name in (*KEYS, "completion", "tools", "system")]

    def __call__(self, row: Any, where: str) -> str:
        """The document of a row.

        Raises:
            UserError: it has no conversation, or one that the template rejects or in which the
                assistant says nothing; names `where`.
        """
        # A mark in a message would pass for one of the template's.
        messages, tools = conversation(row, where)
        text = json.dumps([messages, tools], ensure_ascii=False)
        if any(mark in text for mark in MARKS):
            raise UserError(
                f"{where}: contains one of U+FDD0 to U+FDD2", "remove the character", Code.MALFORMED
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(
                f"{where}: no message of the assistant", "remove the row", Code.INCOMPLETE
            )
        try:
            document = self._marked(messages, tools)
        except self._error as error:
            raise UserError(
                f"{where}: {error}", "correct or remove the row", Code.MALFORMED
            ) from None
        if BEGIN not in document.replace(BEGIN + END, ""):
            raise UserError(
                f"{where}: the assistant says nothing", "remove the row", Code.INCOMPLETE
            )
        return checked_text(document, where)

    def _marked(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        plain = [self._tokenizer.plain(message) for message in messages]
        plain_tools = self._tokenizer.plain(tools)

        def render(count: int, begins_answer: bool = False) -> str:
            return self._template.render(
                plain[:count], begins_answer, tools=plain_tools, with_marks=True
            )

        whole = render(len(plain))
        if self._template.marks_assistant:
            return whole
        # Without `{% generation %}` in the template: what a message adds to the prompt for it, up
        # to the token that ends the turn. The separator behind that is the template's.
        pieces, position = [], 0
        for i, message in enumerate(plain):
            if message["role"] != "assistant":
                continue
            prompt, after = render(i, begins_answer=True), render(i + 1)
            begin = _common(prompt, after, whole)
            ends = self._ends.search(after, begin)
            end = ends.end(1) if ends else len(after)
            answer = after[begin:end]
            if ends and whole[begin:end] != answer:
                # Templates may drop the reasoning of earlier turns: then the end of it is left.
                end = whole.find(ends[1], begin) + len(ends[1])
            # The answer must not begin within the prompt for it, nor before what is written
            # already.
            is_known = begin >= max(position, _common(prompt, render(i) if i else prompt))
            if not (is_known and end > begin and answer.endswith(whole[begin:end].lstrip())):
                raise self._error(
                    "the chat template changes earlier messages, so what the assistant writes is "
                    "unknown: put {% generation %} around it in the template"
                )
            pieces += [whole[position:begin], BEGIN, whole[begin:end], END]
            position = end
        return "".join([*pieces, whole[position:]])


def _common(*texts: str) -> int:
    """Length of the longest common beginning."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071 - characters are compared


def chat_reader(
    settings: PrepareSettings, tokenizer: str | Path, loaded: Tokenizer | None
) -> Chats | None:
    """What reads a corpus of conversations; None if `Prepare.chat` is False.

    Args:
        tokenizer: the tokenizer's file or folder, which has the chat template too.
        loaded: that tokenizer; None if it has yet to be trained.

    Raises:
        UserError: there is no chat template; or other settings are not for conversations.
    """
    if not settings.chat:
        return None
    for key, value, cure in (
        ("tokenizer", None if loaded else "train", "the folder of a chat model"),
        ("split_sentences", settings.split_sentences or None, "False"),
        ("format", None if settings.format == "megatron" else settings.format, "megatron"),
    ):
        if value is not None:
            raise UserError(
                f"Prepare.chat=True cannot be combined with Prepare.{key}={value}",
                f"set Prepare.{key} to {cure}",
                Code.CONFLICTING_OPTIONS,
            )
    assert loaded is not None
    return Chats(Path(tokenizer), loaded)


def conversation(row: Any, where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages of a row as a chat template reads them, and its tools.

    Raises:
        UserError: it has no conversation, or a malformed one; names `where`.
    """
    from pydantic import ValidationError

    from lathe_serving.gateway.template import Message

    key = next((key for key in KEYS if isinstance(row, Mapping) and row.get(key) is not None), None)
    if key is None:
        keys = ", ".join(map(repr, [*row][:8])) if isinstance(row, Mapping) else ""
        raise UserError(
            f"{where}: no conversation: no key messages, conversations, or prompt with completion, "
            f"among {keys or 'none'}",
            f"write {Chats.example}",
            Code.MALFORMED,
        )
    turns = row[key]
    # All forms become a list of OpenAI's messages.
    if key == "prompt":
        sides = [("user", turns), ("assistant", row.get("completion"))]
        turns = [
            message
            for role, side in sides
            for message in (side if isinstance(side, list) else [{"role": role, "content": side}])
        ]
    if not isinstance(turns, list) or not turns:
        raise UserError(
            f"{where}: {key} is not a list of messages", f"write {Chats.example}", Code.MALFORMED
        )
    if key == "conversations" and isinstance(row.get("system"), str) and row["system"]:
        turns = [{"from": "system", "value": row["system"]}, *turns]
    # Each message is checked by the gateway's own model, so that what trains can also be served.
    messages = []
    for number, message in enumerate(turns, 1):
        if isinstance(message, Mapping) and "from" in message:
            role = str(message["from"]).lower()
            message = {"role": ROLES.get(role, role), "content": message.get("value")}
        try:
            is_empty = isinstance(message, Mapping) and not (
                message.get("content") or message.get("tool_calls")
            )
            if is_empty and message.get("role") != "system":
                raise UserError(
                    f"{where}: message {number} is empty", "remove the row", Code.INCOMPLETE
                )
            checked = Message.model_validate(message)
            for call in checked.tool_calls:  # the gateway leaves a call that was cut as it is
                if not isinstance(call.function.arguments, dict):
                    what = f"the arguments of {call.function.name} are not JSON of an object"
                    raise UserError(
                        f"{where}: message {number}: {what}", "remove the row", Code.MALFORMED
                    )
            messages.append(checked.of_template())
        except ValidationError as error:
            raise UserError(
                f"{where}: message {number}: {first_mistake(error)}",
                "correct or remove the row",
                Code.MALFORMED,
            ) from None
    return messages, _tools(row, where)


def _tools(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The tools of a row, a list or its JSON; None if there are none."""
    tools: Any = row.get("tools") or None
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: tools", "write a list of tools") or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UserError(
            f"{where}: tools is not a list of objects", "write OpenAI's form", Code.MALFORMED
        )
    checked: list[dict[str, Any]] | None = tools
    return checked


def unmarked(document: str) -> str:
    """The rendered text of a document."""
    return re.sub(f"[{''.join(MARKS)}]", "", document)


class ChatEncoder:
    """Encodes documents, with the mask of what the assistant writes.

    The template writes every special token, except for what the tokenizer puts before a text. A
    token counts as the assistant's if it has one of the assistant's characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.bos = tokenizer, bos_ids(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        names = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self.special = re.compile(f"({'|'.join(map(re.escape, names))})")
        tokenizer.encode_special_tokens = False

    def __call__(self, documents: Sequence[str]) -> TokenBatch:
        """Ids of documents, with a mask."""
        texts = [re.sub(f"[{BEGIN}{END}]", "", document) for document in documents]
        # The tokenizer encodes a batch on all cores; texts with the names of special tokens in
        # messages go through it in parts, one after the other.
        whole = iter(
            self.tokenizer.encode_batch(
                [text for text in texts if BREAK not in text], add_special_tokens=False
            )
        )
        all_ids, masks = [], []
        for document, text in zip(documents, texts, strict=True):
            if BREAK in text:
                ids, offsets = self._in_parts(text)
            else:
                encoding = next(whole)
                ids, offsets = encoding.ids, encoding.offsets
            # A token is the assistant's if it has a character of one of its spans.
            characters = np.array(offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(ids), bool)
            for begin, end in _spans(document):
                mask |= (characters[:, 0] < end) & (characters[:, 1] > begin)
            # What the tokenizer puts before a text, unless the template has written it.
            bos = self.bos if ids[: len(self.bos)] != self.bos else []
            all_ids.append(np.array([*bos, *ids], np.uint32))
            masks.append(np.append(np.zeros(len(bos), bool), mask))
        sizes = np.fromiter(map(len, all_ids), np.int64, len(all_ids))
        return TokenBatch(np.concatenate(all_ids), sizes, mask=np.concatenate(masks))

    def _in_parts(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and characters of a text in which messages have the text of special tokens: those
        that are whole were written by the template."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for part in self.special.split(text):
            is_token = self.special.fullmatch(part) is not None
            self.tokenizer.encode_special_tokens = not is_token
            part = part.replace(BREAK, "")
            encoding = self.tokenizer.encode(part, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(position + a, position + b) for a, b in encoding.offsets]
            position += len(part)
        self.tokenizer.encode_special_tokens = False
        return ids, offsets


def _spans(document: str) -> Iterator[tuple[int, int]]:
    """(begin, end) of what the assistant writes, in characters of the text without marks."""
    position, begin = 0, 0
    for piece in re.split(f"([{''.join(MARKS)}])", document):
        if piece == BEGIN:
            begin = position
        elif piece == END:
            if position > begin:
                yield begin, position
        elif piece != BREAK:
            position += len(piece)
