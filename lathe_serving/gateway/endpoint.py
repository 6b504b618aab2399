"""A path that generates: from a request's body to the last byte of its response."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from lathe_base.errors import StageError, UserError
from lathe_serving.gateway.calls import Call, Report, Usage
from lathe_serving.gateway.connections import FILLER
from lathe_serving.gateway.errors import ApiError, of_backend, of_validation
from lathe_serving.gateway.generation import Json
from lathe_serving.gateway.limits import Admission, DrainDeadline
from lathe_serving.gateway.requests import Unsupported

log = logging.getLogger("lathe")

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
        (b"x-accel-buffering", b"no"),
    ],
}


class Answer(Protocol):
    """A parsed request, answered by one of the two methods."""

    is_stream: bool
    usage: Usage

    async def whole(self) -> Json:
        """The complete response."""

    def stream(self) -> AsyncGenerator[bytes]:
        """The server-sent events of a response."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""


class Endpoint:
    """An ASGI application for one path.

    Args:
        read: parses the body, which is any JSON, and returns an `Answer` or the response itself;
            raises ValidationError or ApiError.
        reports: called for each request at its end.
        max_body: bytes; a longer body is about more tokens than a context has. Parsing it would
            stop the other requests meanwhile.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[Any, Call], Awaitable[Answer | Json]],
        admission: Admission,
        reports: Sequence[Report],
        deadline: DrainDeadline,
        max_body: int | None = None,
    ) -> None:
        self._path, self._read, self._admission, self._reports = path, read, admission, reports
        self._deadline, self._max_body = deadline, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, is_streaming = Call(self._path, scope), False
        answer: Answer | Json | None = None

        async def noting(message: Message) -> None:
            nonlocal is_streaming
            is_streaming = is_streaming or message is STREAM_START
            await send(message)

        try:
            call.caller = self._admission.check(scope)
            call.caller.begin()
            # Without this type any web page could make a browser send requests; see `web`.
            kind = Headers(scope=scope).get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"the content type is {kind[:100]!r}: send application/json")
            async with self._deadline.limit():
                body = await self._admission.body(scope, receive)
                if self._max_body is not None and len(body) > self._max_body:
                    what = f"{len(body):,} bytes have more tokens than the positions of the model"
                    raise ApiError(400, what, code="context_length_exceeded")
                with self._admission.place(call.caller):
                    try:
                        document = json.loads(body)
                    except (ValueError, RecursionError) as error:
                        raise ApiError(400, f"the body is not JSON: {error}") from None
                    answer = await self._read(document, call)
                    if isinstance(answer, dict):
                        status = await _send_whole(answer, scope, receive, send)
                    else:
                        call.usage = answer.usage
                        work = _send(answer, scope, receive, noting)
                        status = await until_disconnect(work, receive)
        except Exception as error:
            told = as_api_error(error)
            status = told.status
            if is_streaming and answer is not None and not isinstance(answer, dict):
                await send({"type": "http.response.body", "body": answer.failed(told)})
            else:
                await told.response()(scope, receive, send)
        call.end(status, self._reports)


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an API error for the client; unexpected ones are logged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case ApiError():
            return error
        case ValidationError():
            return of_validation(error)
        case Unsupported():
            return ApiError(400, str(error), param=error.field, code="unsupported_parameter")
        case UserError() | StageError():
            return of_backend(error)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the gateway failed")


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
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _send(answer: Answer, scope: Scope, receive: Receive, send: Send) -> int:
    if not answer.is_stream:
        return await _send_whole(await answer.whole(), scope, receive, send)
    async with aclosing(answer.stream()) as events:
        first = asyncio.ensure_future(anext(events))
        comments = None
        try:
            await asyncio.wait({first}, timeout=FIRST_SECONDS)
            if first.done():
                first.result()  # an error that comes soon has a status of its own
            await send(STREAM_START)
            scope["state"][FILLER] = COMMENT
            comments = asyncio.create_task(_comment(send))
            await _send_piece(send, await first)
            async for piece in events:
                await _send_piece(send, piece)
        finally:
            tasks = [task for task in (first, comments) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return 200


async def _send_whole(answer: Json, scope: Scope, receive: Receive, send: Send) -> int:
    await JSONResponse(answer)(scope, receive, send)
    return 200


async def _comment(send: Send) -> None:
    """Send comments, which clients skip, because proxies close connections that are silent for
    long."""
    while True:
        await asyncio.sleep(COMMENT_SECONDS)
        await _send_piece(send, COMMENT)


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
