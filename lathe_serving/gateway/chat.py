"""/v1/chat/completions: the checkpoint's chat template turns messages into a prompt."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.generation import (
    DONE,
    REASONS,
    Generation,
    GenerationTask,
    Head,
    Json,
    error_events,
    event,
    token_bytes,
)
from lathe_serving.gateway.models import Model
from lathe_serving.gateway.renderer import Renderer
from lathe_serving.gateway.requests import ChatRequest, Constraint, Conversation
from lathe_serving.gateway.schemas import ToolSchemas
from lathe_serving.gateway.slots import SlotsForCall
from lathe_serving.gateway.tools import (
    CallReader,
    TextReader,
    call_format_for,
    merge_deltas,
    tool_grammar,
)
from lathe_serving.gateway.triton import Triton
from lathe_serving.runtime.params import MAX_CONSTRAINT_CHARACTERS
from lathe_serving.runtime.protocol import Chunk


async def render_prompt(request: Conversation, model: Model, renderer: Renderer) -> list[int]:
    """Token ids of the prompt that the model's template creates from the messages.

    Raises:
        ApiError: the model has no chat template, it does not use a supported tool call format, or
            it rejects the messages.
    """
    if not model.chat_template:
        what = f"{model.name} has no chat template: use /v1/completions instead"
        raise ApiError(400, what, param="model", code="no_chat_template")
    if request.usable_tools and call_format_for(model.chat_template) is None:
        what = (
            f"the chat template of {model.name} does not use a tool call format that Lathe supports"
        )
        raise ApiError(400, what, param="tools", code="no_tool_format")
    return await renderer.ids(
        {
            "messages": [message.of_template() for message in request.messages],
            "tools": request.usable_tools or None,
            "add_generation_prompt": request.add_generation_prompt is not False,
            "continue_final_message": request.continue_final_message,
            "variables": request.chat_template_kwargs,
        }
    )


async def chat_constraint(
    request: ChatRequest, model: Model, schemas: ToolSchemas
) -> Constraint | None:
    """What constrains the answer: the tools' grammar, or what the request gives.

    Raises:
        ApiError: a strict tool's schema cannot be enforced, or the schemas are too large.
    """
    constraint = request.constraint
    call_format = call_format_for(model.chat_template)
    if not request.usable_tools or call_format is None:
        return constraint
    tools = await schemas.enforceable(request.usable_tools)
    names = set(request.callable_names)
    grammar = tool_grammar(
        call_format,
        [tool for tool in tools if tool["function"]["name"] in names],
        request.may_reply,
        request.may_call_more,
        constraint.json_schema if constraint else None,
    )
    value = json.dumps({"grammar": grammar})
    if len(value) > MAX_CONSTRAINT_CHARACTERS:
        what = (
            f"tools: {len(value):,} characters of schemas, without descriptions, exceed "
            f"{MAX_CONSTRAINT_CHARACTERS:,}"
        )
        raise ApiError(400, what, param="tools")
    return Constraint(constraint.field if constraint and request.may_reply else "tools", value)


class Chat:
    """The answer to one request.

    Attributes:
        request: with the model's defaults.
        is_stream: whether the client requested a stream.
        usage: the tokens so far.

    Args:
        prompt: token ids from `render_prompt`.
        constraint: that of `chat_constraint`.

    Raises:
        ApiError: the prompt leaves no room, or more sequences than the model generates
            concurrently.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt: list[int],
        constraint: Constraint | None,
        model: Model,
        triton: Triton,
        slots: SlotsForCall,
    ) -> None:
        room = model.n_positions - len(prompt)
        if room < (request.limit if request.limit is not None else 1):
            asked = "" if request.limit is None else f" and {request.limit} of the answer"
            what = (
                f"{len(prompt)} tokens of messages{asked} exceed the {model.n_positions} positions"
            )
            raise ApiError(400, what, param="messages", code="context_length_exceeded")
        self._calls = call_format_for(model.chat_template) if request.usable_tools else None
        task = GenerationTask(
            [prompt],
            request.of_backend(room, constraint),
            request.n,
            request.n,
            constraint=constraint,
        )
        self.request = request
        self._generation = Generation(task, model, triton, slots)
        self._whole = Head("chat.completion", model, "chatcmpl")
        self._piece = Head("chat.completion.chunk", model, "chatcmpl")
        self.is_stream, self.usage = request.stream, self._generation.usage

    async def messages(self) -> list[tuple[Json, Json | None, str | None]]:
        """The message, log-probabilities and finish reason of each choice."""
        choices = []
        for chunk in await self._generation.whole():
            reader = self._reader()
            message = merge_deltas(reader.add(chunk.text, chunk.finish_reason))
            choices.append((message, self._logprobs(chunk), _reason(chunk, reader)))
        return choices

    async def deltas(self) -> AsyncGenerator[tuple[int, list[Json], Json | None, str | None]]:
        """The choice's index, deltas, log-probabilities and finish reason, as they are
        generated."""
        readers: dict[int, TextReader | CallReader] = {}
        async with aclosing(self._generation.pieces()) as pieces:
            async for index, chunk in pieces:
                is_first = index not in readers
                reader = readers.setdefault(index, self._reader())
                deltas = reader.add(chunk.text, chunk.finish_reason)
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
        return self._whole.to_json(choices, usage=self.usage.to_json())

    async def stream(self) -> AsyncGenerator[bytes]:
        """The response's server-sent events, as it is generated."""
        usage = {"usage": None} if self.request.includes_usage else {}
        async with aclosing(self.deltas()) as pieces:
            async for index, deltas, logprobs, reason in pieces:
                for delta in deltas:
                    choice = {"index": index, "delta": delta, "logprobs": logprobs}
                    whole = self._piece.to_json([choice | {"finish_reason": None}], **usage)
                    yield event(whole)
                    logprobs = None
                if reason:
                    end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
                    yield event(self._piece.to_json([end], **usage))
        if usage:
            yield event(self._piece.to_json([], usage=self.usage.to_json()))
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""
        return error_events(error)

    def _reader(self) -> TextReader | CallReader:
        if self._calls is None:
            return TextReader()
        return CallReader(self._calls, self.request.callable_names)

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


def _reason(chunk: Chunk, reader: TextReader | CallReader) -> str | None:
    reason = REASONS[chunk.finish_reason]
    return "tool_calls" if reason == "stop" and reader.calls else reason


def _token(name: str, value: float) -> Json:
    return {"token": name, "logprob": value, "bytes": list(token_bytes(name))}
