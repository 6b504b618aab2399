"""Sends prompts to Triton and collects the sequences, for all kinds of responses; and what these
have in common, whole or streamed."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lathe_base.errors import UserError
from lathe_serving.gateway.calls import Usage
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.models import Model
from lathe_serving.gateway.requests import Constraint, Parameters, Prompt
from lathe_serving.gateway.slots import SlotsForCall
from lathe_serving.gateway.triton import Triton
from lathe_serving.runtime.protocol import Chunk

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
REASONS = {"": None, "stop": "stop", "length": "length", "timeout": "length"}

NAMES = {"input_ids": "prompt", "text_input": "prompt"}
"""The client's names of the backend's inputs."""

MAX_UNREAD_CHUNKS = 512
"""Maximum number of chunks that may wait for a slow client."""


def error_events(error: ApiError) -> bytes:
    """The last events of a stream of chunks that an error ends."""
    return event(error.to_json()) + DONE


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of a response share."""

    kind: str
    model: Model
    prefix: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, choices: Sequence[Json], **more: Any) -> Json:
        """A response, or a chunk of one."""
        return {
            "id": f"{self.prefix}-{self.name}",
            "object": self.kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"fp_{self.model.digest[:12]}",
            "choices": list(choices),
            **more,
        }


class TextOffsets:
    """Computes the character offsets of tokens as they arrive."""

    def __init__(self) -> None:
        self._length = 0

    def take(self, chunk: Chunk) -> list[int]:
        """The offsets of a chunk's tokens."""
        *offsets, self._length = accumulate(chunk.lengths, initial=self._length)
        return offsets


def token_bytes(name: str) -> bytes:
    """The bytes of a token, given its name from `TokenBytes.name`."""
    if name.startswith("token_id:"):
        return b""
    if name.startswith("bytes:\\x"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def event(piece: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n"


@dataclass(frozen=True)
class GenerationTask:
    """A generation task.

    Attributes:
        parameters: the backend's.
        n: sequences to return for each prompt.
        sequences: number of sequences to generate for each prompt; the best `n` are returned.
        echo: whether sequences begin with the prompt.
        constraint: of the text.
    """

    prompts: Sequence[Prompt]
    parameters: Parameters
    n: int
    sequences: int
    echo: bool = False
    constraint: Constraint | None = None


class Generation:
    """A running task.

    Attributes:
        usage: the tokens so far.

    Raises:
        ApiError: more sequences than the model generates concurrently, or the expected wait is too
            long.
    """

    def __init__(
        self, task: GenerationTask, model: Model, triton: Triton, slots: SlotsForCall
    ) -> None:
        name = self._sequences_name = "n" if task.n == task.sequences else "best_of"
        if task.sequences > model.max_running:
            what = (
                f"{name} {task.sequences} exceeds the number of sequences that {model.name} "
                "generates concurrently"
            )
            raise ApiError(400, f"{what}, {model.max_running}", param=name)
        slots.require_room()  # before any prompt starts; the first one's place is taken in `hold`
        self._task, self._model, self._triton, self._slots = task, model, triton, slots
        self._turns = asyncio.Semaphore(model.max_running // task.sequences)
        self.usage = Usage()

    async def whole(self) -> list[Chunk]:
        """All sequences, prompt by prompt; best first if more than `n` were generated."""

        def mean_log_probability(chunk: Chunk) -> float:
            new = chunk.log_probabilities[chunk.prompt_tokens if self._task.echo else 0 :]
            return sum(new) / max(len(new), 1)

        async def best(number: int, prompt: Prompt) -> list[Chunk]:
            async with aclosing(self._chunks(number, prompt)) as chunks:
                collected = [chunk async for chunk in chunks]
            if self._task.sequences > self._task.n:
                collected.sort(key=mean_log_probability, reverse=True)
            return collected[: self._task.n]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(best(*one)) for one in enumerate(self._task.prompts)]
        return [chunk for task in tasks for chunk in task.result()]

    async def pieces(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Chunks of all sequences as they arrive, each with the sequence's index in `whole`."""
        queue: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()

        async def put(number: int, prompt: Prompt) -> None:
            async with aclosing(self._chunks(number, prompt)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((number * self._task.n + chunk.sequence, chunk))
                    if queue.qsize() > MAX_UNREAD_CHUNKS:
                        raise ApiError(408, "the answer is not being read")

        async def put_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, prompt in enumerate(self._task.prompts):
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

    async def _chunks(self, number: int, prompt: Prompt) -> AsyncGenerator[Chunk]:
        async with self._turns, self._slots.hold(self._task.sequences, number == 0):
            responses = self._triton.generate(self._model.name, prompt, self._task.parameters)
            since, first = time.monotonic(), None
            try:
                async with aclosing(responses) as chunks:
                    async for chunk in chunks:
                        if first is None and self._task.parameters["stream"]:
                            first = time.monotonic()
                        self.usage.add(chunk, chunk.sequence == 0, self._task.echo)
                        yield chunk
            except UserError as error:
                # The backend's name of a parameter becomes the client's field.
                names = {**NAMES, "num_return_sequences": self._sequences_name}
                if self._task.constraint is not None:
                    names["structured_outputs"] = self._task.constraint.field
                name = re.split("[: ]", error.what, maxsplit=1)[0]
                if name not in names:
                    raise
                what = f"{names[name]}{error.what.removeprefix(name)}"
                if name != "structured_outputs":
                    what += f": {error.hint}"
                raise ApiError(400, what, param=names[name]) from None
            finally:
                self._slots.call.generated(since, first)
