"""Checks before a request is answered: API key, concurrency limit, and size of the body."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from lathe_serving.gateway.calls import ANYBODY
from lathe_serving.gateway.errors import ENDING, ApiError
from lathe_serving.gateway.keys import ApiKeys, Caller

BODY_SECONDS = 30.0
GZIP_OR_ZLIB = 32  # zlib's flag for "whichever of the two formats it is"


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway.

    Attributes:
        requests: requests in flight; further ones are rejected at once.
        prompts: per request.
        body: per request, in bytes.
        bodies: all request bodies being received, in bytes.
        connections: open connections; idle ones are closed for new ones.
    """

    requests: int = 256
    prompts: int = 256
    body: int = 4 * 2**20
    bodies: int = 128 * 2**20
    connections: int = 8192


class Admission:
    """Admission control: keys, requests in flight, and bytes of bodies being received."""

    def __init__(self, limits: Limits, keys: ApiKeys | None) -> None:
        self.limits, self._keys = limits, keys
        self.in_flight, self._bodies = 0, 0
        self.is_draining = False

    def check(self, scope: Scope) -> Caller:
        """Whose key the request has.

        Raises:
            ApiError: keys are required, and the request has no valid one.
        """
        if self._keys is None:
            return ANYBODY
        authorization = Headers(scope=scope).get("authorization", "")
        caller = self._keys.find(authorization)
        if caller is None:
            what = "invalid API key" if authorization else "no API key: send Authorization: Bearer"
            raise ApiError(401, what, code="invalid_api_key")
        return caller

    @contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        """Count a request in flight while the block runs.

        Raises:
            ApiError: there are too many, of this caller or of all, or the gateway is shutting down.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code=ENDING)
        if self.in_flight >= self.limits.requests:
            what = f"{self.limits.requests} requests are already being answered"
            raise ApiError(503, what, code="overloaded")
        with caller.place():
            self.in_flight += 1
            try:
                yield
            finally:
                self.in_flight -= 1

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body.

        Raises:
            ApiError: it is too large, is not sent in time, or the client has disconnected; or too
                many are being received.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code=ENDING)
        too_large = ApiError(413, f"the body exceeds {self.limits.body} bytes")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.body:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the body ended early")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._bodies += len(parts[-1])
                    if size > self.limits.body:
                        raise too_large
                    if self._bodies > self.limits.bodies:
                        raise ApiError(503, "too many bytes are being uploaded", code="overloaded")
                    if not message.get("more_body"):
                        return self._decoded(b"".join(parts), scope)
        except TimeoutError:
            raise ApiError(408, f"incomplete body after {BODY_SECONDS:g} s") from None
        finally:
            self._bodies -= size

    def _decoded(self, body: bytes, scope: Scope) -> bytes:
        coding = Headers(scope=scope).get("content-encoding", "identity").strip().lower()
        if coding == "identity":
            return body
        if coding not in ("gzip", "x-gzip", "deflate"):
            what = f"the content encoding is {coding[:100]!r}: send gzip, deflate or none"
            raise ApiError(415, what)
        decoder = zlib.decompressobj(zlib.MAX_WBITS | GZIP_OR_ZLIB)
        try:
            plain = decoder.decompress(body, self.limits.body + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body is not {coding}: {error}") from None
        if len(plain) > self.limits.body:
            raise ApiError(413, f"the body exceeds {self.limits.body} bytes")
        if not decoder.eof:
            raise ApiError(400, f"the {coding} body ends early")
        return plain


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
