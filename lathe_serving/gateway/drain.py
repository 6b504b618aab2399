"""The end of a gateway that shuts down: requests that are still in flight get an error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lathe_serving.gateway.errors import ENDING, ApiError


class DrainDeadline:
    """The time, not known in advance, at which requests in flight are ended."""

    def __init__(self) -> None:
        self._has_passed = False
        self._timeouts: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the block until the deadline.

        Raises:
            ApiError: the deadline has passed.
        """
        try:
            async with asyncio.timeout(0 if self._has_passed else None) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.remove(timeout)
        except TimeoutError:
            if not timeout.expired():  # the block's own
                raise
            raise ApiError(503, "the server is shutting down", code=ENDING) from None

    def expire(self) -> None:
        """End the blocks that are running, and those that are entered from now on."""
        self._has_passed = True
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())
