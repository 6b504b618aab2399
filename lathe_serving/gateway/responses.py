"""/v1/responses: OpenAI's newer interface to chats, without stored responses.

A request becomes one of `/v1/chat/completions`; the answer's text and tool calls become items.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    field_validator,
    model_validator,
)

from lathe_base.parameters import MAX_TOP
from lathe_serving.gateway.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Chat,
    ChatRequest,
    Function,
    begin_chat,
)
from lathe_serving.gateway.errors import ApiError, Json
from lathe_serving.gateway.generation import (
    Find,
    JsonSchema,
    RequestBody,
    StreamOptions,
    Tokens,
    by_type,
)
from lathe_serving.gateway.telemetry import Call
from lathe_serving.gateway.template import Part, Strict, joined

LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED = {
    "background": False,
    "conversation": None,
    "previous_response_id": None,
    "prompt": None,
}
"""Fields that need stored responses or prompts, each with the value that needs none."""


FIELDS = {"messages": "input", "response_format": "text.format"}
"""The fields of `/v1/chat/completions` by other names."""


@contextmanager
def renamed_fields() -> Iterator[None]:
    """Rename the fields that errors of a chat are about, to those of this interface."""
    try:
        yield
    except Exception as error:
        # Prompts are answered in task groups, whose errors come in groups.
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, ApiError) and first.param in FIELDS:
            first.message = first.message.replace(f"{first.param}:", f"{FIELDS[first.param]}:", 1)
            first.param = FIELDS[first.param]
        raise


class TextPart(Part):
    """A text in a message or a function's output."""

    type: Literal["input_text", "output_text", "text", "refusal"]


Content = Annotated[str, joined(TextPart)]
"""A text, or a list of its parts."""


class InputMessage(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = ""


class FunctionCall(Strict):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Any = None


class FunctionOutput(Strict):
    """What a called tool has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content = ""


class Reasoning(BaseModel):
    """Thoughts of another model, which are skipped."""

    type: Literal["reasoning"]


Item = Annotated[
    InputMessage | FunctionCall | FunctionOutput | Reasoning,
    by_type(InputMessage, FunctionCall, FunctionOutput, Reasoning),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    description: str | None = None


class ChosenFunctionTool(Strict):
    """A tool by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctionTools(Strict):
    """The tools that the model may, or has to, call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunctionTool], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainFormat(BaseModel):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    strict: bool | None = None


class TextOptions(Strict):
    """The format of the answer."""

    format: Annotated[PlainFormat | SchemaFormat, by_type(PlainFormat, SchemaFormat)] = PlainFormat(
        type="text"
    )


class ResponsesRequest(RequestBody):
    """The body of /v1/responses."""

    input: Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    include: Annotated[list[str], Field(default_factory=list)]
    text: TextOptions = TextOptions()
    tools: Annotated[
        list[Annotated[FunctionTool, by_type(FunctionTool)]],
        Field(max_length=MAX_TOOLS, default_factory=list),
    ]
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ChosenFunctionTool | AllowedFunctionTools,
        by_type(*(ChosenFunctionTool, AllowedFunctionTools), words=("auto", "none", "required")),
    ] = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def _is_stateless(cls, body: Any) -> Any:
        for name, harmless in UNSUPPORTED.items():
            if isinstance(body, dict) and body.get(name) not in (None, harmless):
                what = f"{name} is not supported"
                raise ApiError(400, what, param=name, code="unsupported_parameter")
        return body

    @field_validator("input", mode="before")
    @classmethod
    def _typed(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "message", "role": "user", "content": value}]
        if not isinstance(value, list):
            return value
        return [{"type": "message", **one} if isinstance(one, dict) else one for one in value]

    def chat(self) -> ChatRequest:
        """The same request to /v1/chat/completions."""
        choice: Any = self.tool_choice
        if not isinstance(choice, str):
            names = choice.tools if isinstance(choice, AllowedFunctionTools) else [choice]
            chosen = [{"type": "function", "function": {"name": one.name}} for one in names]
            allowed = {"mode": getattr(choice, "mode", None), "tools": chosen}
            is_one = isinstance(choice, ChosenFunctionTool)
            choice = chosen[0] if is_one else {"type": "allowed_tools", "allowed_tools": allowed}
        body = {
            "model": self.model,
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            **self.model_dump(include={"temperature", "top_p"}, exclude_unset=True),
            "logprobs": LOGPROBS in self.include or self.top_logprobs > 0,
            "top_logprobs": self.top_logprobs,
            "tools": [
                {
                    "type": "function",
                    "function": tool.model_dump(exclude={"type"}, exclude_none=True),
                }
                for tool in self.tools
            ],
            "tool_choice": choice if self.tools or choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
        }
        form = self.text.format
        if isinstance(form, SchemaFormat):
            schema = {"name": form.name, "schema": form.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            body["response_format"] = {"type": form.type}
        return ChatRequest.model_validate(body)

    def _messages(self) -> Iterator[Json]:
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        answer: Json = {}  # calls belong to the assistant's message before them
        for item in self.input:
            if isinstance(item, FunctionCall):
                answer = answer or {"role": "assistant", "content": ""}
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
                continue
            if isinstance(item, Reasoning):
                continue  # not the end of the assistant's turn
            if answer:
                yield answer
                answer = {}
            if isinstance(item, FunctionOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            elif item.role == "assistant":
                answer = {"role": "assistant", "content": item.content}
            else:
                yield {"role": item.role, "content": item.content}
        if answer:
            yield answer


async def read_responses(body: Any, call: Call, find: Find) -> "Responses":
    """Parse the body of a request, and begin its answer.

    Raises:
        ValidationError, ApiError: the request is invalid, or cannot be answered now.
    """
    request = ResponsesRequest.model_validate(body)
    with renamed_fields():
        return Responses(request, await begin_chat(request.chat(), call, find))


class Responses:
    """The answer to one request.

    Attributes:
        is_stream: whether the client requested a stream.
        usage: the tokens so far.

    Args:
        chat: the answer to `request.chat()`.
    """

    def __init__(self, request: ResponsesRequest, chat: Chat) -> None:
        self._request, self._chat = request, chat
        self._name, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._events = 0
        self.is_stream, self.usage = request.stream, chat.usage

    async def whole(self) -> Json:
        """The complete response."""
        with renamed_fields():
            ((message, logprobs, reason),) = await self._chat.messages()
        # The same items as those of a stream, built from the whole message as its only deltas.
        items, calls = _Items(), message.get("tool_calls", [])
        deltas = [{"content": message["content"]}] if message["content"] or not calls else []
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
        for delta in deltas:
            for _ in items.add(delta, logprobs):
                pass
            logprobs = None
        for _ in items.end(reason):
            pass
        return self._response(reason, items.done)

    async def stream(self) -> AsyncGenerator[bytes]:
        """The response's server-sent events, as it is generated."""
        event, begun = self._event, {"response": self._response(None, [])}
        items, reason = _Items(), None
        with renamed_fields():
            async with aclosing(self._chat.deltas()) as pieces:
                async for _, deltas, logprobs, finished in pieces:
                    if self._events == 0:  # an error before the first piece has its own status
                        yield event("response.created", begun)
                        yield event("response.in_progress", begun)
                    reason = finished or reason
                    for delta in deltas:
                        for kind, fields in items.add(delta, logprobs):
                            yield event(kind, fields)
                        logprobs = None
        for kind, fields in items.end(reason):
            yield event(kind, fields)
        whole = self._response(reason, items.done)
        yield event(f"response.{whole['status']}", {"response": whole})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that an error ends."""
        told = error.to_json()["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        whole = self._response(None, []) | {
            "status": "failed",
            "error": {"code": code, "message": told["message"]},
        }
        return self._event("response.failed", {"response": whole})

    def _event(self, kind: str, fields: Json) -> bytes:
        piece = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(piece, ensure_ascii=False)}\n\n".encode()

    def _response(self, reason: str | None, items: Sequence[Json]) -> Json:
        request, usage = self._request, self.usage
        options = request.model_dump(by_alias=True)
        kept = (
            *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
            *("text", "tool_choice", "tools", "top_logprobs"),
        )
        is_cut = reason == "length"
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": _status(reason) if reason else "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": request.model,
            "output": list(items),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            }
            if reason
            else None,
            **{name: options[name] for name in kept},
            "temperature": self._chat.request.temperature,
            "top_p": self._chat.request.top_p,
        }


class _Items:
    """The items of a response, built from a chat's deltas.

    Attributes:
        done: the complete ones.
    """

    def __init__(self) -> None:
        self.done: list[Json] = []
        self._item: Json | None = None

    def add(self, delta: Json, logprobs: Json | None) -> Iterator[tuple[str, Json]]:
        """The events of the next delta, each with its type."""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                yield from self._close("completed")
                yield from self._open(
                    {
                        "id": f"fc_{uuid.uuid4().hex}",
                        "type": "function_call",
                        "call_id": call["id"],
                        "name": call["function"]["name"],
                        "arguments": "",
                    }
                )
            if part := call["function"]["arguments"]:
                assert self._item is not None
                self._item["arguments"] += part
                yield "response.function_call_arguments.delta", {**self._position, "delta": part}
        text = delta.get("content")
        content = logprobs["content"] if logprobs else []
        if text or content:
            if self._item is None or self._item["type"] != "message":
                if not text:
                    return  # tokens of a tool call
                yield from self._close("completed")
                yield from self._open_message()
            assert self._item is not None
            part = self._item["content"][0]
            part["text"] += text
            part["logprobs"] += content
            fields = {"content_index": 0, "delta": text, "logprobs": content}
            yield "response.output_text.delta", {**self._position, **fields}

    def end(self, reason: str | None) -> Iterator[tuple[str, Json]]:
        """The events of the end of the text."""
        if self._item is None and not self.done:
            yield from self._open_message()
        yield from self._close(_status(reason))

    @property
    def _position(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.done)}

    def _open_message(self) -> Iterator[tuple[str, Json]]:
        name = f"msg_{uuid.uuid4().hex}"
        yield from self._open({"id": name, "type": "message", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        assert self._item is not None
        yield (
            "response.content_part.added",
            {**self._position, "content_index": 0, "part": {**part}},
        )
        self._item["content"] = [part]

    def _open(self, item: Json) -> Iterator[tuple[str, Json]]:
        self._item = item
        fields = {"output_index": len(self.done), "item": {**item, "status": "in_progress"}}
        yield "response.output_item.added", fields

    def _close(self, status: str) -> Iterator[tuple[str, Json]]:
        item = self._item
        if item is None:
            return
        if item["type"] == "message":
            (part,) = item["content"]
            fields = {**self._position, "content_index": 0}
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**fields, **told}
            yield "response.content_part.done", {**fields, "part": part}
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._position, **told}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._item = None


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"
