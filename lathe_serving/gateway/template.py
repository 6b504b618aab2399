"""How the messages of a conversation become the token ids of a prompt.

From top to bottom: the messages, in OpenAI's form; the chat template that renders them, in Hugging
Face's dialect of Jinja, and the tokenizer; and the processes in which the gateway runs both.

Messages may contain the text of a special token, such as `<|im_end|>`. It is treated as plain text:
only special tokens from the template itself count.

A template comes with a checkpoint, so it may be untrusted: it may never end, or allocate all
memory. In a separate process it does not block other requests, has no access to keys or environment
variables, and is killed after CPU_SECONDS. That process is
`python -m lathe_serving.gateway.template EXPORT CPU_SECONDS NICENESS`: it reads a task and its
arguments as one JSON object per line, and answers each with another.

Long texts take long to tokenize. They have processes of their own, as have `/tokenize` and
`/detokenize`, so that the messages of a usual chat never wait for either. These run with a lower
priority than the model.

Training and evaluation render messages too, with this module and without the server's packages.
"""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    field_validator,
    model_validator,
)
from tokenizers import Tokenizer

from lathe_serving.gateway.errors import ApiError
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

CPU_SECONDS = 5.0  # of one task, whatever else the machine does
WALL_SECONDS = 60.0
LONG = 32 * 1024  # bytes of a task
NICENESS = 10
MAX_WAITING = 64  # tasks, for each kind of process

T = TypeVar("T")


class Strict(BaseModel):
    """A part of a request: a text is not taken for a number, nor 1 for true."""

    model_config = ConfigDict(strict=True)


class Part(Strict):
    """A text in a message's content; a model's refusal has a field of its own for it."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
        return {**value, "text": value.get("refusal")} if is_refusal else value


class MessagePart(Part):
    """A part of a message of `/v1/chat/completions`."""

    type: Literal["text", "refusal"]


def joined(part: type[Part]) -> BeforeValidator:
    """A validator that joins a content's parts; null becomes an empty text."""
    parts: TypeAdapter[list[Part]] = TypeAdapter(list[part])  # type: ignore[valid-type]

    def join(value: Any) -> Any:
        if isinstance(value, list):
            return "".join(one.text for one in parts.validate_python(value))
        return "" if value is None else value

    return BeforeValidator(join)


class CalledFunction(Strict):
    """A called function. The template gets the arguments as an object, or as they are if they are
    none: a call may have been cut, or come from another model."""

    name: str
    arguments: Any = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if value in (None, ""):
            return {}
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, dict) else value


class ToolCall(BaseModel):
    """A tool call in an earlier message."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a conversation; other fields are for the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, joined(MessagePart)] = ""
    tool_calls: list[ToolCall] = []

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        return [] if value is None else value

    @field_validator("role", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return "system" if value == "developer" else value  # OpenAI's new name for it

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") is None and value.get("refusal"):
            return {**value, "content": value["refusal"]}
        return value

    def of_template(self) -> dict[str, Any]:
        """The message for the template: only fields that are set, because some templates test for
        the presence of a name."""
        message = self.model_dump(exclude=None if self.tool_calls else {"tool_calls"})
        return {name: value for name, value in message.items() if value is not None}


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

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = refuse
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


class Turns:
    """Runs functions in threads, at most `count` at a time; MAX_WAITING more may wait."""

    def __init__(self, count: int) -> None:
        self._free, self._threads = asyncio.Semaphore(count), ThreadPoolExecutor(count)
        self._waiting = 0

    async def run(self, what: str, function: Callable[[], T]) -> T:
        """The result of a function.

        Args:
            what: that requests wait for, for errors.

        Raises:
            ApiError: MAX_WAITING of them wait already.
        """
        if self._waiting >= MAX_WAITING:
            error = f"{MAX_WAITING} requests are waiting for {what}"
            raise ApiError(503, error, code="overloaded")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        # A thread cannot be cancelled: when the client leaves, its work is completed.
        work = asyncio.get_running_loop().run_in_executor(self._threads, function)
        work.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(work)

    def close(self) -> None:
        """Wait for the work in progress."""
        self._threads.shutdown()


class Renderer:
    """The processes of one model; they start when they are needed.

    Args:
        folder: the model's export, with `config.json` and `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._chats = TemplateProcesses(folder, 2, 0)
        self._long_chats = TemplateProcesses(folder, 1, NICENESS)
        self._texts = TemplateProcesses(folder, 1, NICENESS)

    async def ids(self, request: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt.

        Args:
            request: `messages`, and the options of `ChatTemplate.render`.

        Raises:
            ApiError: the template rejects the messages, is invalid, or takes too long; the prompt
                is too long; or too many requests wait.
        """
        task = _line({"chat": request})
        processes = self._chats if len(task) <= LONG else self._long_chats
        ids: list[int] = await processes.do(task, "the model's chat template", "messages")
        return ids

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: prepend the tokens that precede every text.

        Raises:
            ApiError: it is too long, or too many requests wait.
        """
        task = _line({"text": text, "add_special_tokens": add_special_tokens})
        ids: list[int] = await self._texts.do(task, "the tokenizer", "prompt")
        return ids

    async def names(self, ids: list[int]) -> list[str]:
        """The tokens as strings of the tokenizer's vocabulary."""
        names: list[str] = await self._texts.do(_line({"names": ids}), "the tokenizer", "tokens")
        return names

    async def detokenize(self, ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: an id is not a token, there are more than the context has, or too many
                requests wait.
        """
        text: str = await self._texts.do(_line({"tokens": ids}), "the tokenizer", "tokens")
        return text

    def close(self) -> None:
        """End the processes."""
        for processes in (self._chats, self._long_chats, self._texts):
            processes.close()


def _line(task: Mapping[str, Any]) -> bytes:
    return json.dumps(task).encode() + b"\n"


class TemplateProcesses:
    """At most `count` processes of `lathe_serving.gateway.template`, each with one task at a
    time."""

    def __init__(self, folder: Path, count: int, niceness: int) -> None:
        self._arguments = [str(folder), str(CPU_SECONDS), str(niceness)]
        self._turns, self._is_closed = Turns(count), False
        self._idle: list[subprocess.Popen[bytes]] = []
        self._processes: set[subprocess.Popen[bytes]] = set()

    async def do(self, task: bytes, who: str, param: str) -> Any:
        """Do a task.

        Args:
            task: a line of JSON.
            who: does it, for errors.
            param: the field that an error is about.

        Raises:
            ApiError: of the task; or see `Turns.run`.
        """
        reply = await self._turns.run(who, lambda: self._exchange(task, who))
        if "done" in reply:
            return reply["done"]
        raise ApiError(reply["status"], reply["error"], param=param, code=reply.get("code"))

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for process in list(self._processes):
            self._end(process)
        self._turns.close()

    def _exchange(self, task: bytes, who: str) -> Any:
        """The reply of a process to a task; it depends on the task alone."""
        while True:
            try:
                process, is_new = self._idle.pop(), False
            except IndexError:
                is_new = True
                process = subprocess.Popen(
                    [sys.executable, "-m", "lathe_serving.gateway.template", *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # Of its own: keys and addresses stay out of a template's reach.
                    env={"PYTHONPATH": str(Path(__file__).parents[2])},
                )
                self._processes.add(process)
            assert process.stdin is not None and process.stdout is not None
            answer, is_late = b"", False
            try:
                process.stdin.write(task)
                process.stdin.flush()
                stdout = select.poll()
                stdout.register(process.stdout, select.POLLIN)
                is_late = not stdout.poll(1000 * WALL_SECONDS)
                answer = b"" if is_late else process.stdout.readline()
            except (OSError, ValueError):
                pass  # it has ended, or been closed
            if answer:
                self._idle.append(process)
                return json.loads(answer)
            status = self._end(process)
            if is_late:
                return {"error": "the machine is too busy", "status": 503, "code": "overloaded"}
            if status == -signal.SIGPROF:
                return {"error": f"{who} takes too long", "status": 400}
            if is_new or self._is_closed:
                return {"error": f"{who} takes too much memory", "status": 400}
            # Earlier tasks may have used the memory: ask a new one.

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End a process, unless it has ended by itself; returns its exit status."""
        process.kill()
        process.communicate()
        self._processes.discard(process)
        return process.returncode


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
