"""Blocking work of requests, in threads: so much at a time, and so many that wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lathe_serving.gateway.errors import ApiError

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
