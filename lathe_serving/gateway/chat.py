"""/v1/chat/completions: the checkpoint's chat template turns messages into a prompt.

`read_chat` has the four steps of a request: `ChatRequest` parses the body, `chat_constraint` and
`render_prompt` make the grammar and the prompt, and `Chat` submits them and answers. The module
`responses` wraps these for `/v1/responses`.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from lathe_base.parameters import MAX_CONSTRAINT_CHARACTERS, MAX_TOP
from lathe_serving.gateway.errors import ApiError, Json
from lathe_serving.gateway.generation import (
    DONE,
    REASONS,
    Constraint,
    Find,
    Generation,
    RequestBody,
    Sampling,
    ServedModel,
    Tokens,
    by_type,
    event,
)
from lathe_serving.gateway.telemetry import Call
from lathe_serving.gateway.template import Message, Strict
from lathe_serving.gateway.tools import (
    CallReader,
    call_format_for,
    merge_deltas,
    tool_grammar,
)
from lathe_serving.runtime.protocol import Chunk

MAX_MESSAGES = 4096
MAX_TOOLS = 128


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


TOOLS = TypeAdapter(list[Tool])


class ChosenFunction(Strict):
    """The name of a function."""

    name: str


class ChosenTool(Strict):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Strict):
    """The tools that the model may, or has to, call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """OpenAI's `tool_choice` of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Conversation(RequestBody):
    """The input of the chat template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Json], Field(max_length=MAX_TOOLS, default_factory=list)]
    # As in vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[Json, Field(default_factory=dict)]

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, value: list[Json]) -> list[Json]:
        names = [tool.function.name for tool in TOOLS.validate_python(value)]
        if len(set(names)) < len(names):
            raise ValueError("two functions have the same name")
        return value  # the template is given what the request says, in its order

    @property
    def usable_tools(self) -> list[Json]:
        """The tools offered to the model."""
        return self.tools

    @model_validator(mode="after")
    def _one_continuation_mode(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class ChatRequest(Conversation, Sampling):
    """The body of /v1/chat/completions."""

    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ChosenTool | AllowedChoice | None,
        by_type(ChosenTool, AllowedChoice, words=("auto", "none", "required")),
    ] = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.tool_choice not in (None, "auto", "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        known = {tool["function"]["name"] for tool in self.tools}
        for name in self.chosen_names or ():
            if name not in known:
                raise ValueError(f"tool_choice: no tool is called {name!r:.100}")
        constraint = self.constraint
        if self.usable_tools and constraint is not None and constraint.json_schema is None:
            # A grammar for tools can contain a schema for the text beside them, but nothing else.
            raise ValueError(f"{constraint.field} and tools exclude each other")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The names in `tool_choice`; None allows all tools."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, ChosenTool) else None

    @property
    def usable_tools(self) -> list[Json]:
        """The tools offered to the model: none if it must not call any."""
        # With "none" the prompt has no tools either: a model that sees them may call them.
        return [] if self.tool_choice == "none" else self.tools

    @property
    def callable_names(self) -> list[str]:
        """The names of the tools that it may call: those in `tool_choice`, or all."""
        names = self.chosen_names
        return [tool["function"]["name"] for tool in self.tools] if names is None else names

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens in the answer; None means the rest of the context."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer  # 0 is a limit as well


async def read_chat(body: Any, call: Call, find: Find) -> "Chat":
    """Parse the body of a request, and begin its answer.

    Raises:
        ValidationError, ApiError: the request is invalid, or cannot be answered now.
    """
    return await begin_chat(ChatRequest.model_validate(body), call, find)


async def begin_chat(request: ChatRequest, call: Call, find: Find) -> "Chat":
    """Render the prompt of a parsed request, and begin its answer."""
    served = find(request.model, call)
    constraint = await chat_constraint(request, served)
    with call.span("template"):
        prompt = await render_prompt(request, served)
    return Chat(request.with_defaults(served.model.recommended), prompt, constraint, served, call)


async def render_prompt(request: Conversation, served: ServedModel) -> list[int]:
    """Token ids of the prompt that the model's template creates from the messages.

    Raises:
        ApiError: the model has no chat template, it does not use a supported tool call format, or
            it rejects the messages.
    """
    model = served.model
    if not model.chat_template:
        what = f"{model.name} has no chat template: use /v1/completions instead"
        raise ApiError(400, what, param="model", code="no_chat_template")
    if request.usable_tools and call_format_for(model.chat_template) is None:
        what = (
            f"the chat template of {model.name} does not use a tool call format that Lathe supports"
        )
        raise ApiError(400, what, param="tools", code="no_tool_format")
    return await served.renderer.ids(
        {
            "messages": [message.of_template() for message in request.messages],
            "tools": request.usable_tools or None,
            "add_generation_prompt": request.add_generation_prompt is not False,
            "continue_final_message": request.continue_final_message,
            "variables": request.chat_template_kwargs,
        }
    )


async def chat_constraint(request: ChatRequest, served: ServedModel) -> Constraint | None:
    """What constrains the answer: the tools' grammar, or what the request gives.

    Raises:
        ApiError: a strict tool's schema cannot be enforced, or the schemas are too large.
    """
    constraint = request.constraint
    call_format = call_format_for(served.model.chat_template)
    if not request.usable_tools or call_format is None:
        return constraint  # `render_prompt` rejects tools without a format
    tools = await served.schemas.enforceable(request.usable_tools)
    names, choice = set(request.callable_names), request.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    may_reply = mode in (None, "auto")  # without a call
    grammar = tool_grammar(
        call_format,
        [tool for tool in tools if tool["function"]["name"] in names],
        may_reply,
        request.parallel_tool_calls and not isinstance(choice, ChosenTool),
        constraint.json_schema if constraint else None,
    )
    # Bounded here as well as in the backend, whose error would not say that the tools are meant.
    value = json.dumps({"grammar": grammar})
    if len(value) > MAX_CONSTRAINT_CHARACTERS:
        what = (
            f"tools: {len(value):,} characters of schemas, without descriptions, exceed "
            f"{MAX_CONSTRAINT_CHARACTERS:,}"
        )
        raise ApiError(400, what, param="tools")
    # The field that the backend's error is about: the client did not write this grammar.
    return Constraint(constraint.field if constraint and may_reply else "tools", value)


class Chat(Generation):
    """The answer to one request.

    Attributes:
        request: with the model's defaults.

    Args:
        prompt: token ids from `render_prompt`.
        constraint: that of `chat_constraint`.

    Raises:
        ApiError: the prompt leaves no room; or see `Generation`.
    """

    id_prefix = "chatcmpl"

    def __init__(
        self,
        request: ChatRequest,
        prompt: list[int],
        constraint: Constraint | None,
        served: ServedModel,
        call: Call,
    ) -> None:
        model, limit = served.model, request.limit
        # Here, not only in the backend, whose error would not be about messages. Without a limit
        # the answer may take all of the room, as in OpenAI's API.
        room = model.n_positions - len(prompt)
        if room < (limit if limit is not None else 1):
            asked = "" if limit is None else f" and {limit} of the answer"
            what = (
                f"{len(prompt)} tokens of messages{asked} exceed the {model.n_positions} positions"
            )
            raise ApiError(400, what, param="messages", code="context_length_exceeded")
        self.request = request
        self._call_format = call_format_for(model.chat_template) if request.usable_tools else None
        parameters = request.parameters(request.n, room if limit is None else limit, constraint)
        parameters |= {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs}
        super().__init__(
            request, served, call, [prompt], parameters, request.n, constraint=constraint
        )

    async def messages(self) -> list[tuple[Json, Json | None, str | None]]:
        """The message, log-probabilities and finish reason of each choice."""
        choices = []
        for chunk in await self.all_sequences():
            reader = CallReader(self._call_format, self.request.callable_names)
            message = merge_deltas(reader.add(chunk.text, chunk.finish_reason))
            choices.append((message, self._logprobs(chunk), _reason(chunk, reader)))
        return choices

    async def deltas(self) -> AsyncGenerator[tuple[int, list[Json], Json | None, str | None]]:
        """The choice's index, deltas, log-probabilities and finish reason, as they are
        generated."""
        # Each choice has a reader of its own, because their chunks arrive interleaved.
        names = self.request.callable_names
        readers: dict[int, CallReader] = {}
        async with aclosing(self.pieces()) as pieces:
            async for index, chunk in pieces:
                is_first = index not in readers
                if is_first:
                    readers[index] = CallReader(self._call_format, names)
                reader = readers[index]
                deltas = reader.add(chunk.text, chunk.finish_reason)
                # The first delta has the role, and log-probabilities need one to go with.
                if not deltas and (is_first or chunk.names):
                    deltas = [{"content": ""}]
                if is_first:
                    deltas[0] = {"role": "assistant", **deltas[0]}
                yield index, deltas, self._logprobs(chunk), _reason(chunk, reader)

    async def whole(self) -> Json:
        """The complete response."""
        choices = [
            {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
            for index, (message, logprobs, reason) in enumerate(await self.messages())
        ]
        return self.to_json("chat.completion", choices, usage=self.usage.to_json())

    async def stream(self) -> AsyncGenerator[bytes]:
        """The response's server-sent events, as it is generated."""
        kind = "chat.completion.chunk"
        usage = {"usage": None} if self.request.includes_usage else {}
        async with aclosing(self.deltas()) as pieces:
            async for index, deltas, logprobs, reason in pieces:
                for delta in deltas:
                    choice = {"index": index, "delta": delta, "logprobs": logprobs}
                    yield event(self.to_json(kind, [choice | {"finish_reason": None}], **usage))
                    logprobs = None  # those of the chunk, which may have several deltas
                if reason:
                    end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
                    yield event(self.to_json(kind, [end], **usage))
        if usage:
            yield event(self.to_json(kind, [], usage=self.usage.to_json()))
        yield DONE

    def _logprobs(self, chunk: Chunk) -> Json | None:
        if not self.request.logprobs:
            return None
        tops = chunk.top or [{} for _ in chunk.names]
        content = []
        for name, value, top in zip(chunk.names, chunk.log_probabilities, tops, strict=True):
            # The backend adds the sampled token if it is not among the most probable ones.
            others = [_token(*other) for other in top.items()][: self.request.top_logprobs]
            content.append(_token(name, value) | {"top_logprobs": others})
        return {"content": content, "refusal": None}


def _reason(chunk: Chunk, reader: CallReader) -> str | None:
    reason = REASONS[chunk.finish_reason]
    return "tool_calls" if reason == "stop" and reader.calls else reason


def _token(name: str, value: float) -> Json:
    """A token's entry, given its name from `TokenBytes.name`."""
    if name.startswith("token_id:"):  # outside the tokenizer's vocabulary
        encoded = b""
    elif name.startswith("bytes:\\x"):  # a part of a character
        encoded = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    else:
        encoded = name.encode()
    return {"token": name, "logprob": value, "bytes": list(encoded)}
