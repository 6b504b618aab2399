"""/v1/completions: one request may have several prompts, and several choices for each."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from lathe.gateway.answers import (
    DONE,
    Head,
    Json,
    TextOffsets,
    Usage,
    completion_choice,
    completion_logprobs,
    event,
)
from lathe.gateway.errors import ApiError
from lathe.gateway.models import Model
from lathe.gateway.requests import CompletionRequest, Prompt
from lathe.gateway.triton import Triton
from lathe.runtime.protocol import Chunk


class Completion:
    """One request and its answer.

    Attributes:
        is_stream: whether a stream is asked for.
        usage: the tokens so far.

    Raises:
        ApiError: more sequences than the model generates at a time.
    """

    def __init__(self, request: CompletionRequest, model: Model, triton: Triton) -> None:
        if request.sequences > model.max_running:
            name = "n" if request.n == request.sequences else "best_of"
            what = f"{name} {request.sequences} is above what {model.name} generates at a time"
            raise ApiError(400, f"{what}, {model.max_running}", param=name)
        self._request, self._model, self._triton = request, model, triton
        self._head = Head("text_completion", model, "cmpl")
        self._parameters = request.of_backend()
        # A long list of prompts must not fill the queue that others wait in.
        self._turns = asyncio.Semaphore(max(1, model.max_running // request.sequences))
        self.is_stream = request.stream
        self.usage = Usage()

    async def whole(self) -> Json:
        """The answer, when all of it is there."""
        prompts = self._request.prompts
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sequences(prompt)) for prompt in prompts]
        choices = [chunk for task in tasks for chunk in task.result()]
        return self._head.to_json(
            [self._choice(i, chunk, TextOffsets()) for i, chunk in enumerate(choices)],
            usage=self.usage.to_json(),
        )

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer's server-sent events, as it is generated."""
        usage = {"usage": None} if self._request.includes_usage else {}
        offsets: dict[int, TextOffsets] = {}
        async with aclosing(self._pieces()) as pieces:
            async for index, chunk in pieces:
                choice = self._choice(index, chunk, offsets.setdefault(index, TextOffsets()))
                yield event(self._head.to_json([choice], **usage))
        if usage:
            yield event(self._head.to_json([], usage=self.usage.to_json()))
        yield DONE

    async def _sequences(self, prompt: Prompt) -> list[Chunk]:
        """The best `n` sequences for a prompt, best first if there are more than `n`."""
        found = [chunk async for chunk in self._chunks(prompt)]
        if len(found) > self._request.n:
            found.sort(key=self._mean_log_probability, reverse=True)
        return found[: self._request.n]

    async def _pieces(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Pieces of all choices, with their indices, as they come."""
        queue: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()

        async def put(number: int, prompt: Prompt) -> None:
            async for chunk in self._chunks(prompt):
                queue.put_nowait((number * self._request.n + chunk.sequence, chunk))

        async def put_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, prompt in enumerate(self._request.prompts):
                        group.create_task(put(number, prompt))
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(put_all())
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()

    async def _chunks(self, prompt: Prompt) -> AsyncGenerator[Chunk]:
        async with self._turns:
            found = self._triton.generate(self._model.name, prompt, self._parameters)
            async with aclosing(found) as chunks:
                async for chunk in chunks:
                    self.usage.add(chunk, chunk.sequence == 0, self._request.echo)
                    yield chunk

    def _choice(self, index: int, chunk: Chunk, offsets: TextOffsets) -> Json:
        is_asked = self._request.logprobs is not None
        logprobs = completion_logprobs(chunk, offsets) if is_asked else None
        return completion_choice(index, chunk, logprobs)

    def _mean_log_probability(self, chunk: Chunk) -> float:
        new = chunk.log_probabilities[chunk.prompt_tokens if self._request.echo else 0 :]
        return sum(new) / max(len(new), 1)
