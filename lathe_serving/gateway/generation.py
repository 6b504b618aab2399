"""What the endpoints of the OpenAI API share, the fields of their requests and the generation of
their answers; and the simplest of them, /v1/completions.

A module reads a request in four steps, from top to bottom: its pydantic model parses the body, the
prompt is made of it, a `Generation` submits the prompts to Triton, and its subclass turns the
chunks that come back into the response, whole or as events. So three objects belong to a request:
its `Call`, the parsed body, and the `Generation`.

Of a request's fields, those that do not affect the answer (`user`, `store`, `metadata`) and unknown
ones are ignored; unsupported ones that would change the answer are rejected. `reasoning_effort` is
ignored, because the models do not reason.
"""

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from lathe_base.config.settings.types import generation_bounds
from lathe_base.errors import UserError
from lathe_base.parameters import (
    FIELDS,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_IDS,
    MAX_TOP,
)
from lathe_serving.client.transport import Parameter
from lathe_serving.gateway.admission import Slots
from lathe_serving.gateway.connections import MAX_UNREAD_CHUNKS
from lathe_serving.gateway.errors import ApiError, Json, api_code
from lathe_serving.gateway.telemetry import Call
from lathe_serving.gateway.template import Renderer, Strict
from lathe_serving.gateway.tools import ToolSchemas
from lathe_serving.gateway.triton import Model, Triton
from lathe_serving.runtime.protocol import Chunk

MAX_CHOICES = 128
DEFAULT_TOKENS = 16  # of a completion, in OpenAI's API
DONE = b"data: [DONE]\n\n"
# OpenAI's API has no reason for a text that ends by its time limit; it was cut, as by its length.
REASONS = {"": None, "stop": "stop", "length": "length", "timeout": "length"}

CHANGING: dict[str, Any] = {
    # OpenAI's.
    "audio": None,
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "tool_choice": "none",
    "tools": [],
    "web_search_options": None,
    # vLLM's, and of others.
    "allowed_token_ids": [],
    "bad_words": [],
    "grammar": None,
    "include_stop_str_in_output": False,
    "json_schema": None,
    "length_penalty": 1.0,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Unsupported fields that would change the answer, each with the value that changes nothing."""

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's earlier names of constraints."""

Prompt = str | list[int]
Parameters = dict[str, Parameter | Sequence[str]]
Tokens = Annotated[int, generation_bounds("max_tokens")]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Id = Annotated[int, Field(ge=0, le=MAX_INT)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Id], Field(min_length=1)]


def by_type(*models: type[BaseModel], words: Sequence[str] = ()) -> BeforeValidator:
    """A validator of a JSON object that is one of several models by its `type`, or of a word.

    Unlike pydantic's unions it adds no names of its own to the path of an error.
    """
    known = {
        kind: model for model in models for kind in get_args(model.model_fields["type"].annotation)
    }

    def validate(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in known:
            expected = "".join(f"{word!r}, " for word in words) + "or " * bool(words)
            raise ValueError(f"should be {expected}an object of type {', '.join(known)}")
        return known[kind].model_validate(value)

    return BeforeValidator(validate)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False


class RequestBody(Strict):
    """The body of a request; null means the default of a field."""

    model: str

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        for name, harmless in CHANGING.items():
            if name not in cls.model_fields and body.get(name) not in (None, harmless):
                what = f"{name} is not supported"
                raise ApiError(400, what, param=name, code="unsupported_parameter")
        # SDKs send null for parameters that their caller has left out.
        return {name: value for name, value in body.items() if value is not None}


class Constraint(NamedTuple):
    """A constraint on the output.

    Attributes:
        field: the field of the request that sets it.
        value: in the format of the backend's `structured_outputs`.
    """

    field: str
    value: str

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the text; None if something else constrains it."""
        value = json.loads(self.value)
        if value.get("json_object"):
            return {"type": "object"}
        schema = value.get("json")
        return schema if isinstance(schema, dict) else None


class JsonSchema(Strict):
    """A schema with its name, which has no effect."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, which needs it")
        return self

    @property
    def value(self) -> dict[str, Any] | None:
        """The value for `structured_outputs`; None for unconstrained text."""
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class Structured(BaseModel):
    """The fields of a request that constrain the output; at most one may be given."""

    response_format: ResponseFormat | None = None
    # As in vLLM.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(constraints := self._constraints()) > 1:
            raise ValueError(f"{' and '.join(constraints)} exclude each other")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The given constraint, if any."""
        for name, value in self._constraints().items():
            return Constraint(name, json.dumps(value))
        return None

    def _constraints(self) -> dict[str, dict[str, Any]]:
        constrained = self.response_format.value if self.response_format else None
        constraints = {
            "response_format": constrained,
            "structured_outputs": self.structured_outputs,
        }
        for name, kind in GUIDED.items():
            value = getattr(self, name)
            constraints[name] = None if value is None else {kind: value}
        return {name: value for name, value in constraints.items() if value is not None}


class Sampling(Structured, RequestBody):
    """Generation parameters that completions and chats share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    # These two, `top_k` and `repetition_penalty` have ranges and defaults of OpenAI and vLLM, where
    # 0 means greedy and nothing is truncated unless a request says so.
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Annotated[float, generation_bounds("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, generation_bounds("frequency_penalty")] = 0.0
    logit_bias: Annotated[dict[IdText, Bias], Field(max_length=MAX_TOKEN_IDS)] = {}
    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    min_p: Annotated[float, generation_bounds("min_p")] = 0.0
    min_tokens: Tokens = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_TOKEN_IDS)] = []

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def with_defaults(self, recommended: Mapping[str, float]) -> Self:
        """The request with the parameters that the model's authors recommend where it has none."""
        # Not the values but what was set: a request may want the very default of the API.
        omitted = recommended.keys() - self.model_fields_set
        return self.model_copy(update={name: recommended[name] for name in omitted})

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def parameters(
        self, sequences: int, max_tokens: int | None, constraint: Constraint | None
    ) -> Parameters:
        """The backend's parameters for `sequences` sequences; without `max_tokens` its own
        default."""
        same = [name for name, about in FIELDS.items() if about.openai == "same"]
        values: Parameters = {name: getattr(self, name) for name in same if hasattr(self, name)}
        values |= {
            "num_return_sequences": sequences,
            "max_tokens": max_tokens,
            "decode_strategy": "sampling",
            "top_k": max(self.top_k, 0),  # -1 is vLLM's 0
            "seed": None if self.seed is None else self.seed % MAX_INT,  # OpenAI's may be negative
        }
        if self.temperature == 0 or self.top_p == 0:
            # Greedy search finds one sequence; the likeliest token is drawn for each of several.
            values |= {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
            values["decode_strategy"] = "greedy_search" if sequences == 1 else "sampling"
        if self.stop:
            values["stop"] = self.stop
        if constraint is not None:
            values["structured_outputs"] = constraint.value
        for name in ("stop_token_ids", "logit_bias"):  # Triton's parameters are no lists
            value = getattr(self, name)
            values[name] = json.dumps(value) if value else None
        return values


@dataclass(frozen=True)
class ServedModel:
    """A model with all that its requests need; the last two are the gateway's."""

    model: Model
    slots: Slots
    renderer: Renderer
    schemas: ToolSchemas
    triton: Triton


Find = Callable[[str, Call], ServedModel]
"""Returns the model with a name, which the call is then about; raises ApiError if there is none."""


class Generation:
    """The answer to one request: sends its prompts to Triton, and collects the sequences.

    Attributes:
        is_stream: whether the client requested a stream.

    Args:
        request: with the model's defaults.
        parameters: the backend's.
        sequences: number of sequences to generate for each prompt; the best `n` are returned.
        echo: whether sequences begin with the prompt.
        constraint: of the text.

    Raises:
        ApiError: more sequences than the model generates concurrently, or the expected wait is too
            long.
    """

    id_prefix: ClassVar[str]

    def __init__(
        self,
        request: Sampling,
        served: ServedModel,
        call: Call,
        prompts: Sequence[Prompt],
        parameters: Parameters,
        sequences: int,
        echo: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        model = served.model
        name = self._sequences_name = "n" if request.n == sequences else "best_of"
        if sequences > model.max_running:
            what = (
                f"{name} {sequences} exceeds the number of sequences that {model.name} generates "
                f"concurrently, {model.max_running}"
            )
            raise ApiError(400, what, param=name)
        # Before any prompt starts; the first one's place is taken in `hold`.
        served.slots.require_room(call.caller.is_low)
        self._n, self._sequences, self.is_stream = request.n, sequences, request.stream
        self._served, self._call, self.usage = served, call, call.usage
        self._prompts, self._parameters = prompts, parameters
        self._echo, self._constraint = echo, constraint
        # The prompts of a long list wait here for each other, not in the lanes with other requests.
        self._turns = asyncio.Semaphore(model.max_running // sequences)
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._head = {
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"fp_{model.digest[:12]}",
        }

    def to_json(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        """A response, or a chunk of one."""
        return {"id": self._id, "object": kind, **self._head, "choices": choices, **more}

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""
        return event(error.to_json()) + DONE

    async def all_sequences(self) -> list[Chunk]:
        """All sequences, prompt by prompt; best first if more than `n` were generated."""

        def mean_log_probability(chunk: Chunk) -> float:
            new = chunk.log_probabilities[chunk.prompt_tokens if self._echo else 0 :]
            return sum(new) / max(len(new), 1)

        async def best(number: int, prompt: Prompt) -> list[Chunk]:
            async with aclosing(self._chunks(number, prompt)) as chunks:
                collected = [chunk async for chunk in chunks]
            if self._sequences > self._n:
                collected.sort(key=mean_log_probability, reverse=True)
            return collected[: self._n]

        # The first prompt that fails cancels the others, and with them their requests to Triton.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(best(*one)) for one in enumerate(self._prompts)]
        return [chunk for task in tasks for chunk in task.result()]

    async def pieces(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Chunks of all sequences as they arrive, each with the sequence's index in
        `all_sequences`."""
        queue: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()

        async def put(number: int, prompt: Prompt) -> None:
            async with aclosing(self._chunks(number, prompt)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((number * self._n + chunk.sequence, chunk))
                    # The stream from Triton carries other clients' chunks too, so it is read even
                    # if this client does not read; but not forever.
                    if queue.qsize() > MAX_UNREAD_CHUNKS:
                        raise ApiError(408, "the answer is not being read")

        async def put_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, prompt in enumerate(self._prompts):
                        group.create_task(put(number, prompt))
            finally:
                queue.put_nowait(None)  # also after an error, which `await task` below raises

        task = asyncio.create_task(put_all())
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()

    async def _chunks(self, number: int, prompt: Prompt) -> AsyncGenerator[Chunk]:
        """The chunks of one prompt, from its wait for slots to its last sequence's end."""
        served, call = self._served, self._call
        async with self._turns:
            arrived, first = time.monotonic(), None
            async with served.slots.hold(self._sequences, number == 0, call.caller.is_low):
                call.waited(arrived)
                since = time.monotonic()
                responses = served.triton.generate(served.model.name, prompt, self._parameters)
                try:
                    # Closed explicitly: one that is only dropped is finalized at some later time,
                    # and until then Triton would generate for nobody.
                    async with aclosing(responses) as chunks:
                        async for chunk in chunks:
                            if first is None and self.is_stream:
                                first = time.monotonic()
                            call.usage.add(chunk, chunk.sequence == 0, self._echo)
                            yield chunk
                except UserError as error:
                    # The backend's name of a parameter becomes the client's field.
                    names = {
                        "input_ids": "prompt",
                        "text_input": "prompt",
                        "num_return_sequences": self._sequences_name,
                    }
                    if self._constraint is not None:
                        names["structured_outputs"] = self._constraint.field
                    name = re.split("[: ]", error.what, maxsplit=1)[0]
                    if name not in names:
                        raise
                    what = f"{names[name]}{error.what.removeprefix(name)}"
                    if name != "structured_outputs":  # its hint is about llguidance
                        what += f": {error.hint}"
                    raise ApiError(400, what, names[name], api_code(error)) from None
                finally:
                    call.generated(since, first)


def event(piece: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n"


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(min_length=1)]
    max_tokens: Tokens = DEFAULT_TOKENS
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    suffix: str | None = None
    return_token_ids: bool = False  # as in vLLM

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _is_prompt(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:  # with a mistake for each of the four forms
            raise ValueError(
                "must be a string, a list of strings, token ids, or a list of token id lists"
            ) from None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> None:
        if value:
            raise ValueError("not supported: the model cannot fill in text")

    @model_validator(mode="after")
    def _best_fits(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        if self.stream and self.sequences > self.n:
            raise ValueError("best_of above n cannot be streamed")
        return self

    @property
    def sequences(self) -> int:
        """Number of sequences to generate for each prompt; the best `n` are returned."""
        return max(self.n, self.best_of or 0)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)


async def read_completion(body: Any, call: Call, find: Find, max_prompts: int) -> "Completion":
    """Parse the body of a request, and begin its answer.

    Raises:
        ValidationError, ApiError: the request is invalid, or cannot be answered now.
    """
    request = CompletionRequest.model_validate(body)
    if len(request.prompts) > max_prompts:
        what = f"{len(request.prompts)} prompts exceed the limit of {max_prompts}"
        raise ApiError(400, what, param="prompt")
    served = find(request.model, call)
    return Completion(request.with_defaults(served.model.recommended), served, call)


class Completion(Generation):
    """The answer to one request.

    Raises:
        ApiError: see `Generation`.
    """

    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, served: ServedModel, call: Call) -> None:
        self._request = request
        parameters = request.parameters(request.sequences, request.max_tokens, request.constraint)
        parameters |= {
            "echo": request.echo,
            # The best sequences are those with the highest mean log-probability.
            "logprobs": request.logprobs is not None or request.sequences > request.n,
            "top_logprobs": request.logprobs or 0,
        }
        super().__init__(
            *(request, served, call, request.prompts, parameters),
            *(request.sequences, request.echo, request.constraint),
        )
        self._lengths: dict[int, int] = {}  # characters of each choice's text so far

    async def whole(self) -> Json:
        """The complete response."""
        choices = [self._choice(*one) for one in enumerate(await self.all_sequences())]
        return self.to_json("text_completion", choices, usage=self.usage.to_json())

    async def stream(self) -> AsyncGenerator[bytes]:
        """The response's server-sent events, as it is generated."""
        usage = {"usage": None} if self._request.includes_usage else {}
        async with aclosing(self.pieces()) as pieces:
            async for index, chunk in pieces:
                choices = [self._choice(index, chunk)]
                yield event(self.to_json("text_completion", choices, **usage))
        if usage:
            yield event(self.to_json("text_completion", [], usage=self.usage.to_json()))
        yield DONE

    def _choice(self, index: int, chunk: Chunk) -> Json:
        logprobs = None
        if self._request.logprobs is not None:
            start = self._lengths.get(index, 0)
            *offsets, self._lengths[index] = accumulate(chunk.lengths, initial=start)
            # The first token of an echoed prompt has none: NaN here, null in JSON.
            values = [None if math.isnan(v) else v for v in chunk.log_probabilities]
            logprobs = {
                "tokens": chunk.names,
                "token_logprobs": values,
                "top_logprobs": [top or None for top in chunk.top] if any(chunk.top) else None,
                "text_offset": offsets,
            }
        ids = {"token_ids": chunk.tokens} if self._request.return_token_ids else {}
        return {
            "index": index,
            "text": chunk.text,
            **ids,
            "logprobs": logprobs,
            "finish_reason": REASONS[chunk.finish_reason],
        }
