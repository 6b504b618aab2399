"""/v1/completions: one request may have several prompts, and several choices for each."""

import math
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
    TextOffsets,
    error_events,
    event,
)
from lathe_serving.gateway.models import Model
from lathe_serving.gateway.requests import CompletionRequest
from lathe_serving.gateway.slots import SlotsForCall
from lathe_serving.gateway.triton import Triton
from lathe_serving.runtime.protocol import Chunk


class Completion:
    """The answer to one request.

    Attributes:
        is_stream: whether the client requested a stream.
        usage: the tokens so far.

    Raises:
        ApiError: more sequences than the model generates concurrently.
    """

    def __init__(
        self, request: CompletionRequest, model: Model, triton: Triton, slots: SlotsForCall
    ) -> None:
        task = GenerationTask(
            request.prompts,
            request.of_backend(),
            request.n,
            request.sequences,
            request.echo,
            request.constraint,
        )
        self._request = request
        self._generation = Generation(task, model, triton, slots)
        self._head = Head("text_completion", model, "cmpl")
        self.is_stream, self.usage = request.stream, self._generation.usage

    async def whole(self) -> Json:
        """The complete response."""
        chunks = await self._generation.whole()
        choices = [self._choice(i, chunk, TextOffsets()) for i, chunk in enumerate(chunks)]
        return self._head.to_json(choices, usage=self.usage.to_json())

    async def stream(self) -> AsyncGenerator[bytes]:
        """The response's server-sent events, as it is generated."""
        usage = {"usage": None} if self._request.includes_usage else {}
        offsets: dict[int, TextOffsets] = {}
        async with aclosing(self._generation.pieces()) as pieces:
            async for index, chunk in pieces:
                choice = self._choice(index, chunk, offsets.setdefault(index, TextOffsets()))
                yield event(self._head.to_json([choice], **usage))
        if usage:
            yield event(self._head.to_json([], usage=self.usage.to_json()))
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""
        return error_events(error)

    def _choice(self, index: int, chunk: Chunk, offsets: TextOffsets) -> Json:
        logprobs = None
        if self._request.logprobs is not None:
            # The first token of an echoed prompt has none: NaN here, null in JSON.
            values = [None if math.isnan(v) else v for v in chunk.log_probabilities]
            logprobs = {
                "tokens": chunk.names,
                "token_logprobs": values,
                "top_logprobs": [top or None for top in chunk.top] if any(chunk.top) else None,
                "text_offset": offsets.take(chunk),
            }
        ids = {"token_ids": chunk.tokens} if self._request.return_token_ids else {}
        return {
            "index": index,
            "text": chunk.text,
            **ids,
            "logprobs": logprobs,
            "finish_reason": REASONS[chunk.finish_reason],
        }
