"""Limits on the number of open connections and on their idle time.

uvicorn answers requests, but has no options for these limits. If there are too many connections,
the one that has been idle for longest is closed, or else the one with the oldest unfinished
headers.
"""

import asyncio
import logging
import resource
import socket
import struct
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import h11

from lathe_serving.gateway.errors import ApiError

if TYPE_CHECKING:
    HTTPProtocol: Any = object
else:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol

log = logging.getLogger("lathe")

State = Literal["idle", "head", "answer", "blocked", "closing"]
SECONDS: dict[State, float] = {"idle": 75.0, "head": 10.0, "blocked": 30.0, "closing": 10.0}
"""Timeouts of a connection: idle, sending its headers, not reading its responses, and draining
after the last response. There is no limit on the time of a response."""

MAX_HEADER_BYTES = 2**15
"""Maximum size of a request line and headers, in bytes."""

MAX_BODY_CHUNKS = 2**14
"""Maximum number of chunks of a request body: each takes time, however short it is."""

STATUS_START = b"HTTP/1.1 "
"""How all responses begin."""

FILLER = "filler"
"""Key of a request's state: bytes that the body of its response, which has begun, may contain
anywhere."""

SPARE_FILES = 64
"""File descriptors reserved for everything except connections."""


class Connections:
    """The connections of one gateway.

    Args:
        limit: maximum number of open connections.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[Connection, State] = {}
        self._since: dict[State, dict[Connection, float]] = {state: {} for state in SECONDS}
        self.half_closed: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._states)

    def add(self, connection: "Connection") -> None:
        """Accept a new connection, or reject it if all others are being answered."""
        if len(self._states) >= self._limit:
            # Each dict is in the order of `put`, so its first connection has waited for longest.
            unused = (one for state in ("idle", "head") for one in self._since[state])
            if (oldest := next(unused, None)) is None:
                what = f"{self._limit} connections are already being answered"
                connection.refuse(ApiError(503, what, code="overloaded"))
                return
            oldest.expire("idle")
            self.remove(oldest)
        self.put(connection, "idle")

    def put(self, connection: "Connection", state: State) -> None:
        """Set the state of a connection."""
        self.remove(connection)
        self._states[connection] = state
        if state in self._since:
            self._since[state][connection] = time.monotonic()

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that has ended."""
        if state := self._states.pop(connection, None):
            self._since.get(state, {}).pop(connection, None)

    def state(self, connection: "Connection") -> State | None:
        """The state of a connection; None after it is closed."""
        return self._states.get(connection)

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
        for connection in list(self._states):
            if connection.cycle is not None and self._states[connection] != "head":
                connection.shutdown()

    def abort_reset(self) -> None:
        """Close half-closed connections whose clients have closed them altogether."""
        for connection in list(self.half_closed):
            peer = connection.transport.get_extra_info("socket")
            if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                connection.transport.abort()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in list(self._states):
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
        if data and self.has_begun:
            data, self.has_begun = data.removeprefix(STATUS_START), False
        return data

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refusal = ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
            raise
        if isinstance(event, h11.Request):
            self._pieces = 0
            if event.http_version not in (b"1.0", b"1.1"):
                self._refuse(ApiError(505, "the HTTP version must be 1.0 or 1.1"))
            if (
                len(event.target) + sum(len(n) + len(value) for n, value in event.headers)
                > MAX_HEADER_BYTES
            ):
                self._refuse(ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes"))
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # A proxy may take the other one for the length, and see another request after it.
                self._refuse(ApiError(400, "the body has two conflicting lengths"))
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > MAX_BODY_CHUNKS:
                self._refuse(ApiError(413, f"the body has more than {MAX_BODY_CHUNKS} chunks"))
        return event

    def _refuse(self, error: ApiError) -> NoReturn:
        self.refusal = error
        raise h11.RemoteProtocolError(error.message)


class Connection(HTTPProtocol):  # type: ignore[misc]
    """One connection, as uvicorn's protocol.

    It uses h11 rather than the faster httptools, which loses the body of requests that offer an
    upgrade to HTTP/2, as Java's client always does, and answers HTTP/1.0 in chunks.
    """

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
        if self._all.state(self) == "idle":
            self._all.put(self, "head")
        super().data_received(data)
        may_switch = self.conn.their_state is h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]
        if may_switch and not self.conn.trailing_data[0]:
            self.flow.resume_reading()  # so that it is seen when the client leaves
        if self._is_answering and self._all.state(self) == "head":
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
        if self._all.state(self) == "answer":
            self._all.put(self, "blocked")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._all.state(self) == "blocked":
            self._all.put(self, "answer")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def raise_file_limit() -> int:
    """Raise this process's limit of open files to its maximum; returns the number of connections
    that fit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return hard_limit - SPARE_FILES
