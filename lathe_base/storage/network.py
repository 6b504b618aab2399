"""Connections that time out if a server is silent or too slow.

A socket's timeout starts again with every byte, so it would wait forever for a server that sends
one byte per second. Here a response must also keep up a minimum rate.
"""

import http.client
import io
import math
import os
import socket
import time
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import urllib3

from lathe_base.errors import Code, UserError

VARIABLE = "LATHE_NETWORK_TIMEOUT"
DEFAULT_SECONDS = 15.0
PATIENCE = "LATHE_NETWORK_PATIENCE"
DEFAULT_PATIENCE = 300.0
CONNECT_SECONDS = 5.0
SLOWEST = 100  # bytes a second
SEND_BYTES = 1 << 16
LOCAL = ("localhost", "127.0.0.1", "::1")
"""This machine, which no proxy can reach."""


def network_timeout() -> float:
    """Seconds without a response after which a request times out: LATHE_NETWORK_TIMEOUT.

    Raises:
        UserError: it is not a number above 0 and up to 86400.
    """
    return _seconds(VARIABLE, DEFAULT_SECONDS, may_be_zero=False)


def network_patience() -> float:
    """Seconds to keep retrying an unavailable server that is known to exist:
    LATHE_NETWORK_PATIENCE; 0 disables waiting.

    Raises:
        UserError: it is not a number from 0 to 86400.
    """
    return _seconds(PATIENCE, DEFAULT_PATIENCE, may_be_zero=True)


def _seconds(variable: str, default: float, may_be_zero: bool) -> float:
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400 or not (seconds or may_be_zero):
        bounds = "from 0 to" if may_be_zero else "above 0 and up to"
        raise UserError(
            f"{variable}={text}: not a number of seconds",
            f"give a number {bounds} 86400, such as {default:g}",
            Code.INVALID_VALUE,
        )
    return seconds


class _Paced(io.RawIOBase):
    """A socket's input that times out below SLOWEST bytes/s over `limit` seconds."""

    def __init__(self, raw: io.RawIOBase, limit: float) -> None:
        self._raw, self._limit = raw, limit
        self._waited, self._received = 0.0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        # Only the time in which the server is waited for counts, not that in which the reader is
        # busy with what has arrived.
        started = time.monotonic()
        count: int | None = self._raw.readinto(buffer)
        self._waited += time.monotonic() - started
        self._received += count or 0
        if self._waited >= self._limit:
            if self._received < SLOWEST * self._limit:
                raise TimeoutError(f"{self._received} bytes in {self._waited:.0f} s")
            self._waited, self._received = 0.0, 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        # `fp` is the buffered reader that HTTPResponse has made of the socket.
        if limit := sock.gettimeout():
            self.fp = io.BufferedReader(_Paced(self.fp.detach(), limit))


def _send(connection: Any, send: Any, data: Any) -> None:
    """Send bytes in chunks, because the timeout of `sendall` covers the whole buffer."""
    if connection.sock is None:  # `send` would connect too, but then there is no timeout to set
        connection.connect()
    connection.sock.settimeout(network_timeout())
    pieces = range(0, len(data), SEND_BYTES) if isinstance(data, bytes) else ()
    for start in pieces:
        send(data[start : start + SEND_BYTES])
    if not pieces:
        send(data)


class _PoolHTTP(urllib3.connection.HTTPConnection):
    response_class = _Response

    def send(self, data: Any) -> None:
        _send(self, super().send, data)


class _PoolHTTPS(urllib3.connection.HTTPSConnection):
    response_class = _Response

    def send(self, data: Any) -> None:
        _send(self, super().send, data)


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _PoolHTTP


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _PoolHTTPS


def pool(
    connections: int, read_seconds: float | None = None, address: str = ""
) -> urllib3.PoolManager:
    """Connection pool for the client of a store; it does not retry.

    Args:
        read_seconds: seconds to wait for an answer; `network_timeout()` by default.
        address: of the server; the environment may name a proxy for it (`HTTPS_PROXY`, `NO_PROXY`).
    """
    limit = network_timeout()
    named: dict[str, Any] = {
        "timeout": urllib3.Timeout(connect=min(CONNECT_SECONDS, limit), read=read_seconds or limit),
        "retries": False,
        "maxsize": connections,
        "ca_certs": authorities(),
    }
    if proxy := proxy_for(address):
        manager: urllib3.PoolManager = urllib3.ProxyManager(
            proxy.address, proxy_headers=proxy.headers, **named
        )
    else:
        manager = urllib3.PoolManager(**named)
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager


def authorities() -> str | None:
    """The file with the certificate authorities to trust: AWS_CA_BUNDLE or REQUESTS_CA_BUNDLE; None
    for the system's, which OpenSSL's SSL_CERT_FILE replaces.

    Raises:
        UserError: the file does not exist.
    """
    for variable in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if path := os.environ.get(variable):
            if not os.path.isfile(path):
                raise UserError(
                    f"{variable}={path}: no such file",
                    "name a file of certificates, or unset it",
                    Code.NOT_FOUND,
                )
            return path
    return None


class Proxy(NamedTuple):
    """A proxy, and its authentication headers."""

    address: str
    headers: dict[str, str]


def proxy_for(address: str) -> Proxy | None:
    """The proxy for `address` according to the environment (HTTPS_PROXY, NO_PROXY)."""
    parts = urlsplit(address)
    if parts.hostname in (None, *LOCAL) or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return as_proxy(proxy) if proxy else None


def as_proxy(address: str) -> Proxy:
    """A proxy, given its address, which may contain a user and a password."""
    address = address if "://" in address else f"http://{address}"
    parts = urlsplit(address)
    login = unquote(f"{parts.username}:{parts.password or ''}") if parts.username else None
    return Proxy(address, dict(urllib3.make_headers(proxy_basic_auth=login)))
