"""The gateway's HTTP server, with graceful shutdown."""

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from lathe_base.errors import StageError, UserError
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.connections import MAX_HEADER_BYTES, Connection, Connections
from lathe_serving.reach import is_this_machine

LAST_SECONDS = 2
"""Seconds in which clients may read the last responses before their connections are closed."""

SWEEP_TICKS = 10  # of uvicorn's, 0.1 s each
BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default


class Server(uvicorn.Server):
    """uvicorn with limits for connections.

    After SIGTERM it is no longer ready, rejects new requests, and ends when those in flight have
    been answered. After `drain_seconds`, or at a second signal, the rest of them get an error.

    Args:
        origins: allowed origins of web pages (CORS).
        host: address to listen on.
        ports: all serve the same API; 0 picks a free one.
        hosts: allowed host names; see `Web`.
        tls: PEM files of the certificate chain and of its private key; without them, plain HTTP.

    Raises:
        StageError: a port is not available.
        UserError: a file of `tls` is missing or invalid.
    """

    def __init__(
        self,
        gateway: Gateway,
        origins: Sequence[str],
        drain_seconds: float,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        hosts: Sequence[str] = (),
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self._gateway, self._drain_seconds = gateway, drain_seconds
        self._sockets = [_listen(host, port) for port in ports]
        self._connections = Connections(gateway.limits.connections)
        self._deadline: float | None = None
        super().__init__(
            uvicorn.Config(
                gateway.app(origins, hosts, is_this_machine(host)),
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
            self.config.load()
            self.config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                self.config.ssl.load_cert_chain(*tls)
            except (OSError, ssl.SSLError) as error:
                what = f"{tls[0]}, {tls[1]}: not a certificate and its private key: {error}"
                raise UserError(what, "give two PEM files, the key without a password") from None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and answer until SIGTERM."""
        super().run(sockets or self._sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second signal ends the server at once."""
        self.should_exit = self._gateway.is_draining
        self._gateway.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests in flight, and the connections."""
        self._gateway.deadline.expire()
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._connections.abort)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second."""
        self._connections.abort_reset()
        if counter % SWEEP_TICKS == 0:
            self._connections.sweep()
        if self._gateway.is_draining:
            now = time.monotonic()
            if self._deadline is None:  # the first tick since SIGTERM
                self._deadline = now + self._drain_seconds
                self._connections.drain()
            self.should_exit |= not self._gateway.in_flight or now > self._deadline
        return await super().on_tick(counter)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StageError(f"cannot listen on {host}:{port}: {error.strerror}") from None
