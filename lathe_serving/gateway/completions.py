"""/v1/completions: one request may have several prompts, and several choices for each."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from lathe_base.parameters import MAX_TOP
from lathe_serving.gateway.errors import ApiError, Json
from lathe_serving.gateway.generation import (
    DONE,
    MAX_CHOICES,
    REASONS,
    Find,
    Generation,
    Id,
    Prompt,
    Sampling,
    ServedModel,
    Tokens,
    event,
)
from lathe_serving.gateway.telemetry import Call
from lathe_serving.runtime.protocol import Chunk

DEFAULT_TOKENS = 16

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Id], Field(min_length=1)]


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
