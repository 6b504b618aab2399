"""Limits on slow, idle and hostile clients: on connections, headers, bodies and unread responses.

uvicorn answers requests, but has no options for most of these limits. Each connection is in one
state, and may be in it for `SECONDS[state]`:

    idle -> head -> answer <-> blocked -> idle ... -> closing

- `idle`: nothing of a request has come. If there are too many connections, the one that has been
  idle for longest is closed, or else the one with the oldest unfinished headers.
- `head`: a request has begun, and its headers are not complete.
- `answer`: the request is being answered, which may take any time. Its body is limited by
  `read_body`, and `until_disconnect` ends it when the client leaves.
- `blocked`: the client does not read. Chunks of a stream wait for it up to `MAX_UNREAD_CHUNKS`.
- `closing`: everything has been sent, and the client still has to read it.

From top to bottom: the server, which sweeps its connections ten times a second; the connections and
their states; and what a request needs of its client, its body and its presence.
"""

import asyncio
import logging
import resource
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope

from lathe_base.errors import Code, StageError, UserError
from lathe_serving.gateway.admission import Admission
from lathe_serving.gateway.errors import ApiError, shutting_down

if TYPE_CHECKING:
    HTTPProtocol: Any = object
else:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol

log = logging.getLogger("lathe")

State = Literal["idle", "head", "answer", "blocked", "closing"]
SECONDS: dict[State, float] = {"idle": 75.0, "head": 10.0, "blocked": 30.0, "closing": 10.0}
"""Timeouts of a connection in its states; there is no limit on the time of a response."""

BODY_SECONDS = 30.0
"""Maximum time in which a body has to arrive."""

LAST_SECONDS = 2
"""Seconds in which clients may read the last responses before the server ends."""

MAX_HEADER_BYTES = 2**15
"""Maximum size of a request line and headers, in bytes."""

MAX_BODY_CHUNKS = 2**14
"""Maximum number of chunks of a request body: each takes time, however short it is."""

MAX_UNREAD_CHUNKS = 512
"""Maximum number of chunks of a stream that may wait for a slow client."""

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that has closed the connection
GZIP_OR_ZLIB = 32  # zlib's flag for "whichever of the two formats it is"

STATUS_START = b"HTTP/1.1 "
"""How all responses begin."""

FILLER = "filler"
"""Key of a request's state: bytes that the body of its response, which has begun, may contain
anywhere."""

SWEEP_TICKS = 10  # of uvicorn's, 0.1 s each
BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default
SPARE_FILES = 64
"""File descriptors reserved for everything except connections."""


class Server(uvicorn.Server):
    """uvicorn with limits for connections, and with an orderly end.

    After SIGTERM it is no longer ready, rejects new requests, and ends when those in flight have
    been answered. After `drain_seconds`, or at a second signal, the rest of them get an error.

    Args:
        app: the application.
        admission: says what is in flight, and ends it.
        host: address to listen on.
        ports: all serve the same API; 0 picks a free one.
        tls: PEM files of the certificate chain and of its private key; without them, plain HTTP.

    Raises:
        StageError: a port is not available.
        UserError: a file of `tls` is missing or invalid.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        drain_seconds: float,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self._admission, self._drain_seconds = admission, drain_seconds
        # Before uvicorn starts: a port in use is an error of the command line.
        self._sockets = []
        for port in ports:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                raise StageError(
                    f"cannot listen on {host}:{port}: {error.strerror}", Code.IN_USE
                ) from None
            self._sockets.append(listening)
        self._connections = Connections(admission.limits.connections)
        self._deadline: float | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self._connections),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                log_level="error",
                timeout_keep_alive=3600,  # Connections ends idle ones
                # After it uvicorn would cancel requests with a traceback; `shutdown` leaves none.
                timeout_graceful_shutdown=LAST_SECONDS + 1,
                access_log=False,
                server_header=False,
                log_config=None,
            )
        )
        if tls is not None:
            # Here, not by uvicorn's options: a wrong file is an error of the command line.
            self.config.load()
            self.config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                self.config.ssl.load_cert_chain(*tls)
            except (OSError, ssl.SSLError) as error:
                what = f"{tls[0]}, {tls[1]}: not a certificate and its private key: {error}"
                raise UserError(
                    what, "give two PEM files, the key without a password", Code.MALFORMED
                ) from None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and answer until SIGTERM."""
        super().run(sockets or self._sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second signal ends the server at once."""
        self.should_exit = self._admission.is_draining
        self._admission.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests in flight, and the connections."""
        self._admission.expire()  # those in flight now get their error or last event
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._connections.abort)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second."""
        self._connections.abort_reset()  # every 0.1 s: a cancelled request should free its slot
        if counter % SWEEP_TICKS == 0:
            self._connections.sweep()
        if self._admission.is_draining:
            now = time.monotonic()
            if self._deadline is None:  # the first tick since SIGTERM
                self._deadline = now + self._drain_seconds
                self._connections.drain()
            self.should_exit |= not self._admission.in_flight or now > self._deadline
        return await super().on_tick(counter)


class Connections:
    """The connections of one gateway.

    Args:
        limit: maximum number of open connections.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Connection] = set()
        # When each has come to its state; a dict keeps the order, so the first has waited longest.
        self._since: dict[State, dict[Connection, float]] = {state: {} for state in SECONDS}
        self.half_closed: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: "Connection") -> None:
        """Accept a new connection, or reject it if all others are being answered."""
        if len(self._open) >= self._limit:
            unused = (one for state in ("idle", "head") for one in self._since[state])
            if (oldest := next(unused, None)) is None:
                what = f"{self._limit} connections are already being answered"
                connection.refuse(ApiError(503, what, code="overloaded"))
                return
            oldest.expire("idle")
            self.remove(oldest)  # now: asyncio calls `connection_lost` in a later turn of its loop
        self.put(connection, "idle")

    def put(self, connection: "Connection", state: State) -> None:
        """Set the state of a connection."""
        self.remove(connection)
        self._open.add(connection)
        connection.state = state
        if state in self._since:
            self._since[state][connection] = time.monotonic()

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that has ended."""
        self._open.discard(connection)
        for since in self._since.values():
            since.pop(connection, None)
        connection.state = None

    def sweep(self) -> None:
        """Close connections that have timed out."""
        now = time.monotonic()
        for state, since in self._since.items():
            late = [c for c, then in since.items() if now - then > SECONDS[state]]
            for connection in late:
                connection.expire(state)

    def drain(self) -> None:
        """Close idle connections now, and the others after their responses.

        New ones, and those that have begun to send a request, stay open, so that the request is
        rejected rather than lost.
        """
        for connection in list(self._open):
            if connection.cycle is not None and connection.state != "head":
                connection.shutdown()

    def abort_reset(self) -> None:
        """Close half-closed connections whose clients have closed them altogether."""
        for connection in list(self.half_closed):
            peer = connection.transport.get_extra_info("socket")
            if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                connection.transport.abort()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in list(self._open):
            connection.transport.abort()


class _Requests(h11.Connection):
    """The server's side of a connection, with limits that h11 has no option for.

    Attributes:
        refusal: the error message for the client, if it is not the default one for malformed HTTP.
        has_begun: whether STATUS_START of the next response has been sent.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self.refusal = ApiError(400, "not an HTTP request")
        self.has_begun = False
        self._pieces = 0

    def send(self, event: Any) -> Any:
        data = super().send(event)
        if data and self.has_begun:  # `STATUS_START` has been sent already
            data, self.has_begun = data.removeprefix(STATUS_START), False
        return data

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refusal = ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
            raise
        refusal = None
        if isinstance(event, h11.Request):
            self._pieces = 0
            names = {name for name, _ in event.headers}
            size = len(event.target) + sum(len(n) + len(value) for n, value in event.headers)
            if event.http_version not in (b"1.0", b"1.1"):
                refusal = ApiError(505, "the HTTP version must be 1.0 or 1.1")
            elif size > MAX_HEADER_BYTES:
                refusal = ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
            elif {b"content-length", b"transfer-encoding"} <= names:
                # A proxy may take the other one for the length, and see another request after it.
                refusal = ApiError(400, "the body has two conflicting lengths")
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > MAX_BODY_CHUNKS:
                refusal = ApiError(413, f"the body has more than {MAX_BODY_CHUNKS} chunks")
        if refusal is not None:
            self.refusal = refusal
            raise h11.RemoteProtocolError(refusal.message)
        return event


class Connection(HTTPProtocol):  # type: ignore[misc]
    """One connection, as uvicorn's protocol.

    It uses h11 rather than the faster httptools, which loses the body of requests that offer an
    upgrade to HTTP/2, as Java's client always does, and answers HTTP/1.0 in chunks.

    Attributes:
        state: set by `Connections`; None before it is accepted, and after it is closed.
    """

    state: State | None = None

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Requests()
        self._all = connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._all.remove(self)
        self._all.half_closed.discard(self)
        super().connection_lost(error)

    def eof_received(self) -> bool:
        """Called when the client has closed its side: the connection stays open if it waits for a
        response.

        A client that has also closed the other side looks the same until it gets data, and its
        kernel refuses them. So the response is begun at once, with what all responses have in
        common, and `Connections.abort_reset` sees the refusal.
        """
        if self.transport.get_extra_info("sslcontext"):
            return False  # asyncio closes those in any case
        self._all.half_closed.add(self)
        return self._begin_response()

    def _begin_response(self) -> bool:
        """Send what makes a client that has left refuse it; returns False if no complete request
        waits for a response."""
        if not self._is_answering or self.cycle.more_body:
            return False
        if not self.cycle.response_started:
            self.conn.has_begun = True
            self.transport.write(STATUS_START)
        elif filler := self.scope["state"].get(FILLER):
            self.transport.write(self.conn.send(h11.Data(data=filler)))
        return True

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.state == "idle":
            self._all.put(self, "head")
        super().data_received(data)
        may_switch = self.conn.their_state is h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]
        if may_switch and not self.conn.trailing_data[0]:
            self.flow.resume_reading()  # so that it is seen when the client leaves
        if self._is_answering and self.state == "head":
            self._all.put(self, "answer")

    def refuse(self, error: ApiError) -> None:
        """Respond with an error, and close."""
        reply = error.response()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in reply.raw_headers]
        lines += [b"connection: close", b"", bytes(reply.body)]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()
        self._all.put(self, "closing")

    def expire(self, state: State) -> None:
        """Close the connection, which has been in a state for too long."""
        if state == "head":
            self.refuse(ApiError(408, f"incomplete headers after {SECONDS['head']:g} s"))
            return
        if state in ("blocked", "closing"):  # what the kernel still holds goes as well
            peer = self.transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send_400_response(self, _: str) -> None:
        """Called by uvicorn for malformed requests."""
        if self._is_answering and self.cycle.response_started:
            self.transport.abort()  # no second answer in the middle of the first
        else:
            self.refuse(self.conn.refusal)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Requests that came one after another before the client closed its side are all answered.
        if self in self._all.half_closed and not self._begin_response():
            self.transport.close()
        if self.transport.is_closing():
            self._all.put(self, "closing")
        elif not self._is_answering:
            self._all.put(self, "idle")

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._all.put(self, "closing")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.state == "answer":
            self._all.put(self, "blocked")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.state == "blocked":
            self._all.put(self, "answer")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


async def read_body(admission: Admission, scope: Scope, receive: Receive) -> bytes:
    """Receive the body of a request, and decompress it.

    Raises:
        ApiError: it is too large, is not sent in time, or the client has disconnected; or too many
            are being received; or the gateway is shutting down.
    """
    if admission.is_draining:
        raise shutting_down()
    limits, headers = admission.limits, Headers(scope=scope)
    too_large = ApiError(413, f"the body exceeds {limits.body} bytes")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limits.body:
        raise too_large  # before any of it is read
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the body ended early")
                part, more = message.get("body", b""), message.get("more_body", False)
                parts.append(part)
                size += len(part)
                admission.receiving += len(part)
                if size > limits.body:
                    raise too_large
                if admission.receiving > limits.bodies:
                    raise ApiError(503, "too many bytes are being uploaded", code="overloaded")
    except TimeoutError:
        raise ApiError(408, f"incomplete body after {BODY_SECONDS:g} s") from None
    finally:
        admission.receiving -= size
    body = b"".join(parts)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        what = f"the content encoding is {coding[:100]!r}: send gzip, deflate or none"
        raise ApiError(415, what)
    decoder = zlib.decompressobj(zlib.MAX_WBITS | GZIP_OR_ZLIB)
    try:
        # One byte more than is allowed tells a body that is too large from one that just fits;
        # a few kilobytes may be gigabytes when they are decompressed.
        plain = decoder.decompress(body, limits.body + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not {coding}: {error}") from None
    if len(plain) > limits.body:
        raise too_large
    if not decoder.eof:
        raise ApiError(400, f"the {coding} body ends early")
    return plain


async def until_disconnect(work: Coroutine[Any, Any, int], receive: Receive) -> int:
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


def raise_file_limit() -> int:
    """Raise this process's limit of open files to its maximum; returns the number of connections
    that fit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return hard_limit - SPARE_FILES
