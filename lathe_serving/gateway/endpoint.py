"""A path that generates: from the headers of a request to the last byte of its response.

An `Endpoint` admits the request, receives its body, lets one of `completions`, `chat` and
`responses` read it, and sends the answer that it returns: whole, or as server-sent events. All ends
of a request meet here: a client that leaves, an error before or within a stream, and the deadline
of a gateway that shuts down.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from lathe_serving.gateway.admission import Admission
from lathe_serving.gateway.connections import FILLER, Bodies
from lathe_serving.gateway.errors import ApiError, Json, as_api_error, shutting_down
from lathe_serving.gateway.telemetry import Call, Report

COMMENT = b": keep-alive\n\n"
COMMENT_SECONDS = 15.0
FIRST_SECONDS = 2.0
"""Maximum time that a stream's headers wait for its first chunk."""

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that has closed the connection
STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect events before it passes them on
    ],
}


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
            raise shutting_down() from None

    def expire(self) -> None:
        """End the blocks that are running, and those that are entered from now on."""
        self._has_passed = True
        for timeout in self._timeouts:  # each cancels its own task, in the next turn of the loop
            timeout.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True)
class Entrance:
    """What the requests of all endpoints pass, with one instance for a gateway.

    Attributes:
        reports: called for each request at its end.
    """

    admission: Admission
    bodies: Bodies
    deadline: DrainDeadline
    reports: Sequence[Report]


class Answer(Protocol):
    """A parsed request, answered by one of the two methods."""

    is_stream: bool

    async def whole(self) -> Json:
        """The complete response."""

    def stream(self) -> AsyncGenerator[bytes]:
        """The server-sent events of a response."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""


Read = Callable[[Any, Call], Awaitable[Answer | Json]]
"""Parses the body of a request, which is any JSON, and returns an `Answer` or the response itself;
raises ValidationError or ApiError."""


class Endpoint:
    """An ASGI application for one path.

    Args:
        max_body: bytes; a longer body is about more tokens than a context has. Parsing it would
            stop the other requests meanwhile.
    """

    def __init__(
        self,
        path: str,
        read: Read,
        entrance: Entrance,
        max_body: int | None = None,
    ) -> None:
        self._path, self._read, self._entrance, self._max_body = path, read, entrance, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, admission = Call(self._path, scope), self._entrance.admission
        answer: Answer | Json | None = None
        is_streaming = False

        async def noting(message: Message) -> None:
            nonlocal is_streaming
            is_streaming = is_streaming or message is STREAM_START
            await send(message)

        async def respond(answer: Answer) -> int:
            if answer.is_stream:
                await _send_events(answer, scope, noting)
            else:
                await JSONResponse(await answer.whole())(scope, receive, send)
            return 200

        try:
            # From cheap to expensive: nothing of a body is read for a request without a key.
            call.caller = admission.check(scope)
            call.caller.begin()
            # Without this type any web page could make a browser send requests; see `app.Web`.
            kind = Headers(scope=scope).get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"the content type is {kind[:100]!r}: send application/json")
            async with self._entrance.deadline.limit():
                body = await self._entrance.bodies.read(scope, receive)
                if self._max_body is not None and len(body) > self._max_body:
                    what = f"{len(body):,} bytes have more tokens than the positions of the model"
                    raise ApiError(400, what, code="context_length_exceeded")
                with admission.place(call.caller):
                    try:
                        document = json.loads(body)
                    except (ValueError, RecursionError) as error:
                        raise ApiError(400, f"the body is not JSON: {error}") from None
                    answer = await self._read(document, call)
                    if isinstance(answer, dict):  # no work is left that a client could cancel
                        await JSONResponse(answer)(scope, receive, send)
                        status = 200
                    else:
                        status = await until_disconnect(respond(answer), receive)
        except Exception as error:
            told = as_api_error(error)
            status = told.status
            if is_streaming and answer is not None and not isinstance(answer, dict):
                # The status has been sent: only an event can tell the client.
                await send({"type": "http.response.body", "body": answer.failed(told)})
            else:
                await told.response()(scope, receive, send)
        call.end(status, self._entrance.reports)


async def until_disconnect(work: Any, receive: Receive) -> int:
    """Do the work, but cancel it when the client disconnects; returns the status of the
    response."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else CLIENT_CLOSED_REQUEST
    finally:
        for task in (working, leaving):
            task.cancel()
        # Until the work has ended, too: it cancels its request to Triton while it does.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _send_events(answer: Answer, scope: Scope, send: Send) -> None:
    async def send_piece(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def comment() -> None:
        # Clients skip comments; but proxies close connections that are silent for long.
        while True:
            await asyncio.sleep(COMMENT_SECONDS)
            await send_piece(COMMENT)

    async with aclosing(answer.stream()) as events:
        first = asyncio.ensure_future(anext(events))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            await asyncio.wait({first}, timeout=FIRST_SECONDS)
            if first.done():
                first.result()  # an error that comes soon has a status of its own
            await send(STREAM_START)
            # From now on the connection may send comments, too: to find out whether a client that
            # has closed its side still reads.
            scope["state"][FILLER] = COMMENT
            tasks.append(asyncio.create_task(comment()))
            await send_piece(await first)
            async for piece in events:
                await send_piece(piece)
        finally:
            for task in tasks:
                task.cancel()
            # The generator cannot be closed while a task is within it.
            await asyncio.gather(*tasks, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
