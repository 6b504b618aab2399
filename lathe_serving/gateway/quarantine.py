"""Requests that were in flight when Triton crashed: one that crashes it a second time is rejected
from then on.

Most of them are innocent, because a crash ends all requests in flight. So suspects are retried one
at a time: if the server crashes again, the current one is the cause.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lathe_base.errors import StageError, UserError
from lathe_serving.runtime.protocol import BUSY

MAX_DIGESTS = 4096
"""Maximum number of digests kept; the oldest are dropped first."""

TURN_SECONDS = 10.0
"""Maximum time that a retry waits for earlier retries."""


class TritonUnavailable(StageError):
    """Triton does not answer, or has ended a stream."""


class TritonDied(TritonUnavailable):
    """Triton crashed after it had received the request."""


class CrashQuarantine:
    """The digests of such requests."""

    def __init__(self) -> None:
        self._has_crashed_alone: dict[bytes, bool] = {}
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def watch(self, digest: bytes) -> AsyncIterator[None]:
        """Run a request in the block, which raises TritonDied if Triton crashes.

        Raises:
            UserError: the request has crashed Triton twice, or too many retries are waiting.
        """
        if digest not in self._has_crashed_alone:
            try:
                yield
            except TritonDied:
                self._remember(digest, False)
                raise
            return
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            what = (
                f"{BUSY}: the model server has crashed, and its requests are being retried one "
                "by one"
            )
            raise UserError(what, "try again later") from None
        try:
            # Asked again: the same request, sent twice, may have crashed it while this one waited.
            if self._has_crashed_alone.get(digest):
                what = "the model server has crashed twice while answering this request"
                raise UserError(what, "it will not be retried; change the request")
            yield
        except TritonDied:
            self._remember(digest, True)
            raise
        else:
            self._has_crashed_alone.pop(digest, None)
        finally:
            self._turn.release()

    def _remember(self, digest: bytes, crashed_alone: bool) -> None:
        self._has_crashed_alone[digest] = crashed_alone | self._has_crashed_alone.pop(digest, False)
        if len(self._has_crashed_alone) > MAX_DIGESTS:
            del self._has_crashed_alone[next(iter(self._has_crashed_alone))]
