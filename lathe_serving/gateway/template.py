"""Chat templates: Hugging Face's Jinja dialect in a sandbox, and tokenization of the result.

Messages may contain the text of a special token, such as `<|im_end|>`. It is treated as plain text:
only special tokens from the template itself count.

`python -m lathe_serving.gateway.template EXPORT CPU_SECONDS NICENESS` is a process of `Renderer`:
it reads a task and its arguments as one JSON object per line, and answers each with another.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lathe_serving.runtime.grammar_compiler import limit_memory
from lathe_serving.runtime.text import (
    TokenBytes,
    TokenLimit,
    TooManyTokens,
    bos_ids,
    encode_prompts,
)

END_OF_TEXT = "<|endoftext|>"
BREAK = "\ufdd0"
"""Separator that breaks up the text of special tokens within messages; a permanently unassigned
Unicode character."""

CONTINUED = "\ufdd3 "
"""Marks the end of the message to continue; its blank shows whether the template strips it."""

BEGIN, END = "\ufdd1", "\ufdd2"
"""Marks around what the assistant writes, in a prompt that is rendered with them; unassigned as
`BREAK` is."""

OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
"""Template variables that a request may not set."""


class PromptError(Exception):
    """The template cannot create a prompt.

    Args:
        is_broken: the template itself is invalid, whatever the messages are.
    """

    def __init__(self, message: str, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class OutOfMemory(PromptError):
    """The template takes more memory than this process may have."""


class _Generation(Extension):
    """Hugging Face's block `{% generation %}`, which says what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, as a call of `_marked` with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """A chat template.

    Attributes:
        marks_assistant: whether the template says what the assistant writes.

    Raises:
        PromptError: it is not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = lambda value, **more: json.dumps(
            value, ensure_ascii=False, **more
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            self._template = environment.from_string(source)
            self.marks_assistant = re.search(r"{%[-+]?\s*generation\b", source) is not None
        except (TemplateError, MemoryError) as error:
            what = f"the model's chat template is invalid: {error!r}"
            raise PromptError(what, is_broken=True) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        with_marks: bool = False,
    ) -> str:
        """The prompt.

        Args:
            add_generation_prompt: end it with the header of the assistant's next message.
            continue_final_message: end it within the last message instead.
            variables: additional template variables.
            tools: those that the model may call, as in the OpenAI API.
            with_marks: put `BEGIN` and `END` around what the assistant writes, if the template says
                what that is.

        Raises:
            PromptError: the template rejects the messages.
        """
        if reserved := OURS & set(variables or {}):
            raise PromptError(f"chat_template_kwargs must not set {', '.join(sorted(reserved))}")
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + CONTINUED}]
        try:
            prompt = self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                bos_token=END_OF_TEXT,
                eos_token=END_OF_TEXT,
                **variables or {},
            )
        except MemoryError:
            raise OutOfMemory("the model's chat template takes too much memory") from None
        except Exception as error:  # a template is a program of somebody else's
            what = f"the model's chat template rejects the messages: {error}"
            raise PromptError(what) from None
        if not with_marks:
            prompt = prompt.replace(BEGIN, "").replace(END, "")
        if continue_final_message:
            prompt, mark, rest = prompt.rpartition(CONTINUED.strip())
            if not mark or last["content"].strip() not in prompt:
                raise PromptError(
                    "the model's chat template omits parts of the final message, so it cannot be "
                    "continued"
                )
            # As transformers' apply_chat_template.
            prompt = prompt if rest.startswith(" ") else prompt.rstrip()
        if not prompt:
            raise PromptError("the messages result in an empty prompt")
        return prompt


class ChatTokenizer:
    """Turns messages into token ids.

    Args:
        n_positions: length of the context, and of the longest prompt.

    Attributes:
        special: ids of the special tokens, the longest names first.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, n_positions: int) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._limit = TokenLimit(n_positions, TokenBytes(tokenizer).longest)
        added = tokenizer.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        # The longest first, as one may begin with another.
        self.special = dict(sorted(special.items(), key=lambda one: len(one[0]), reverse=True))
        self._bos = bos_ids(tokenizer)

    def ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            tools: see `ChatTemplate.render`.
            options: its other options.

        Raises:
            PromptError: see `ChatTemplate.render`.
            TooManyTokens: the prompt exceeds the context.
        """
        plain = [self.plain(message) for message in messages]
        prompt = self._template.render(plain, tools=self.plain(tools), **options)
        if BREAK not in prompt:
            return self._limit.encode(
                lambda text: encode_prompts(self._tokenizer, [text])[0], [prompt]
            )
        # Special tokens that are still whole were written by the template: split at them.
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", prompt)
        ids = self._limit.encode(self._encode, parts)
        return ids if ids[: len(self._bos)] == self._bos else [*self._bos, *ids]

    def plain(self, value: Any) -> Any:
        """The message with a BREAK in the text of each special token."""
        if isinstance(value, str):
            for token in self.special:
                value = value.replace(token, token[:1] + BREAK + token[1:])
            return value
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        return [self.plain(item) for item in value] if isinstance(value, list) else value

    def _encode(self, part: str) -> list[int]:
        if part in self.special:
            return [self.special[part]]
        self._tokenizer.encode_special_tokens = True
        try:
            text = part.replace(BREAK, "")
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self._tokenizer.encode_special_tokens = False


def _refuse(message: str) -> None:
    raise TemplateError(message)


def main(folder: Path, cpu_seconds: float, niceness: int) -> None:
    """Process tasks until the end of standard input.

    Args:
        cpu_seconds: a task that takes more ends the process by SIGPROF.
        niceness: added to the process's.
    """
    os.nice(niceness)
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    n_positions = json.loads((folder / "export.json").read_text(encoding="utf-8"))["n_positions"]
    limit = TokenLimit(n_positions, TokenBytes(tokenizer).longest)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["lathe"]
    chat: ChatTokenizer | PromptError
    # From here on the template runs, which may be anybody's. If it is invalid, only chats fail.
    limit_memory()  # constants are computed as a template is compiled
    try:
        template = ChatTemplate(settings.get("chat_template", ""))
        chat = ChatTokenizer(template, tokenizer, n_positions)
    except PromptError as error:
        chat = error

    def answer(task: Mapping[str, Any]) -> Any:
        match task:
            case {"chat": request}:
                if isinstance(chat, PromptError):
                    raise chat
                return chat.ids(**request)
            case {"text": text, "add_special_tokens": True}:
                return limit.encode(lambda part: encode_prompts(tokenizer, [part])[0], [text])
            case {"text": text}:
                return limit.encode(
                    lambda part: tokenizer.encode(part, add_special_tokens=False).ids, [text]
                )
            case {"names": ids}:
                return [tokenizer.id_to_token(i) for i in ids]
            case {"tokens": ids}:
                if len(ids) > n_positions:
                    raise TooManyTokens
                wrong = [i for i in ids if i >= 2**32 or tokenizer.id_to_token(i) is None]
                if wrong:
                    size = tokenizer.get_vocab_size()
                    what = f"{wrong[0]} is outside the tokenizer's vocabulary of {size}"
                    raise PromptError(what)
                return tokenizer.decode(ids, skip_special_tokens=False)
        raise AssertionError(task)

    for line in sys.stdin:
        # Counts processor time, so a task may wait for the machine; its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply = {"done": answer(json.loads(line))}
        except (MemoryError, OutOfMemory):
            sys.exit(1)  # `Renderer` asks a new process: earlier tasks have used memory of this one
        except PromptError as error:
            reply = {"error": str(error), "status": 500 if error.is_broken else 400}
        except TooManyTokens:
            what = f"the text has more tokens than the model's {n_positions} positions"
            reply = {"error": what, "status": 400, "code": "context_length_exceeded"}
        except (UnicodeEncodeError, TypeError):  # of the tokenizer
            reply = {"error": "incomplete UTF-8 character", "status": 400}
        text = json.dumps(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
