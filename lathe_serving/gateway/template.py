"""Chat templates: Hugging Face's Jinja dialect in a sandbox, and tokenization of the result.

Messages may contain the text of a special token, such as `<|im_end|>`. It is treated as plain text:
only special tokens from the template itself count.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lathe_serving.runtime.prompt import bos_ids, encode_prompts

END_OF_TEXT = "<|endoftext|>"
BREAK = "\ufdd0"
"""Separator that breaks up the text of special tokens within messages; a permanently unassigned
Unicode character."""

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
        if named := OURS & set(variables or {}):
            raise PromptError(f"chat_template_kwargs must not set {', '.join(sorted(named))}")
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
            raise PromptError("the model's chat template takes too much memory") from None
        except Exception as error:  # a template is a program of somebody else's
            what = f"the model's chat template rejects the messages: {error}"
            raise PromptError(what) from None
        if not with_marks:
            prompt = prompt.replace(BEGIN, "").replace(END, "")
        if continue_final_message:
            prompt = _cut_after(messages[-1]["content"].strip(), prompt)
        if not prompt:
            raise PromptError("the messages result in an empty prompt")
        return prompt


class ChatTokenizer:
    """Turns messages into token ids.

    Args:
        longest: maximum size of a prompt in bytes.

    Attributes:
        special: ids of the special tokens, the longest names first.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, longest: int) -> None:
        self._template, self._tokenizer, self._longest = template, tokenizer, longest
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
            PromptError: see `ChatTemplate.render`; or the prompt is too long.
        """
        plain = [self.plain(message) for message in messages]
        prompt = self._template.render(plain, tools=self.plain(tools), **options)
        if len(prompt.encode(errors="replace")) > self._longest:
            raise PromptError(f"the messages result in a prompt of over {self._longest:,} bytes")
        if BREAK not in prompt:
            return encode_prompts(self._tokenizer, [prompt])[0]
        # Special tokens that are still whole were written by the template: split at them.
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", prompt)
        ids = [id for part in parts for id in self._encode(part)]
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


def _cut_after(content: str, prompt: str) -> str:
    start = prompt.rfind(content)
    if start < 0:
        raise PromptError(
            "the model's chat template changes the final message, so it cannot be continued"
        )
    return prompt[: start + len(content)]


def _refuse(message: str) -> None:
    raise TemplateError(message)
