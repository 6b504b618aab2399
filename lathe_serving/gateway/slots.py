"""Request scheduling: requests wait here for a slot in a model's running batch rather than in
Triton, so that the gateway can estimate their wait."""

import asyncio
import math
import time
from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from lathe_serving.gateway.calls import Call
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.models import Model

AHEAD = 1
"""Number of sequences that wait in Triton, so that its batch stays full between two requests."""

DEFAULT_WAIT = 0.5
"""Maximum expected wait, relative to the recent time per prompt."""

EWMA_ALPHA = 0.1
"""Weight of the newest time in the moving average of the time per prompt."""

LOW_SHARE = 8
"""One in so many prompts that get slots is of low priority, if any of these wait."""

Lane = deque[tuple[int, Future[None]]]


class Slots:
    """The slots of one model.

    A request is rejected if the expected wait for its first sequence exceeds `model.max_wait`. By
    Little's law the wait is the number of sequences ahead of it, times the recent time per prompt,
    divided by the number of slots. Further prompts of an accepted request take turns with the first
    prompts of others.

    Requests of low priority wait for all others, except that every LOW_SHARE-th prompt is theirs.
    """

    def __init__(self, model: Model) -> None:
        self._name, self._max_wait = model.name, model.max_wait
        self._size = model.max_running + AHEAD
        self._taken = 0
        self._first: Lane = deque()
        self._further: Lane = deque()
        self._low: Lane = deque()
        self._turn = False  # of the further ones
        self._since_low = 0  # prompts
        self._recent = 0.0

    def waiting(self) -> int:
        """Number of waiting sequences."""
        lanes = self._first, self._further, self._low
        return sum(width for lane in lanes for width, _ in lane)

    def expected_wait(self, is_low: bool = False) -> float:
        """Expected wait of a new request, in seconds."""
        return self._ahead(is_low) * self._recent / self._size

    def require_room(self, is_low: bool = False) -> None:
        """Reject a request that would have to wait for too long.

        Args:
            is_low: whether it has low priority.

        Raises:
            ApiError: with the seconds after which there should be room.
        """
        wait = self.expected_wait(is_low)
        if self._max_wait is None:  # of the recent time, which need not be known for this
            is_long = self._ahead(is_low) > DEFAULT_WAIT * self._size
        else:
            is_long = wait > self._max_wait
        if is_long:
            what = f"{self._name} is busy: {self.waiting()} sequences are waiting"
            raise ApiError(503, what, code="overloaded", retry_after=max(1, math.ceil(wait)))

    @asynccontextmanager
    async def hold(self, width: int, is_first: bool, is_low: bool = False) -> AsyncIterator[None]:
        """Wait for `width` slots (all of them, if there are fewer), and hold them while the block
        runs.

        Args:
            is_first: whether the prompt is the first of its request.
            is_low: whether it has low priority.

        Raises:
            ApiError: a first prompt, and there is no room.
        """
        width = min(width, self._size)
        if is_first:
            # In the same turn of the event loop as the place in the lane: of many requests that
            # arrive at once, each sees those before it.
            self.require_room(is_low)
        usual = self._first if is_first else self._further
        await self._take(width, self._low if is_low else usual)
        started = time.monotonic()
        try:
            yield
            seconds = time.monotonic() - started
            # The first time is taken whole: there is nothing to average it with.
            self._recent += (seconds - self._recent) * (EWMA_ALPHA if self._recent else 1.0)
        finally:
            self._give(width)

    def _ahead(self, is_low: bool) -> int:
        if is_low:
            return self.waiting()
        # Each of them may let one of the further prompts go first, as the two take turns.
        return sum(width for width, _ in self._first) * (2 if self._further else 1)

    async def _take(self, width: int, lane: Lane) -> None:
        turn = (width, get_running_loop().create_future())
        lane.append(turn)
        self._admit()
        try:
            await turn[1]
        except CancelledError:
            if not turn[1].cancelled():  # it had its slots already
                self._give(width)
            elif turn in lane:
                lane.remove(turn)
                self._admit()
            raise

    def _give(self, width: int) -> None:
        self._taken -= width
        self._admit()

    def _admit(self) -> None:
        while self._first or self._further or self._low:
            # Alternate between the first two; an empty one gives its turn to the other.
            lane = (self._further if self._turn else self._first) or self._first or self._further
            if not lane or (self._low and self._since_low >= LOW_SHARE - 1):
                lane = self._low
            width, future = lane[0]
            if future.cancelled():  # and its task has not run since
                lane.popleft()
                continue
            if self._taken + width > self._size:
                return
            lane.popleft()
            if lane is not self._low:
                self._turn = lane is self._first
            self._since_low = 0 if lane is self._low else self._since_low + 1
            self._taken += width
            future.set_result(None)


class SlotsForCall:
    """The slots of a model as one request sees them: with its priority, and a record of its
    waiting."""

    def __init__(self, slots: Slots, call: Call) -> None:
        self._slots, self.call = slots, call

    def require_room(self) -> None:
        """See `Slots.require_room`."""
        self._slots.require_room(self.call.caller.is_low)

    @asynccontextmanager
    async def hold(self, width: int, is_first: bool) -> AsyncIterator[None]:
        """See `Slots.hold`."""
        since = time.monotonic()
        async with self._slots.hold(width, is_first, self.call.caller.is_low):
            self.call.waited(since)
            yield


MAX_WAITING = 64

T = TypeVar("T")


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
