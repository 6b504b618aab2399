"""HTTP over raw sockets, for requests that no client library would send."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@contextmanager
def connected(address: str, **options: int) -> Iterator[socket.socket]:
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as found:
        for name, value in options.items():
            found.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        found.settimeout(30)
        found.connect((host, int(port)))
        yield found


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def read_until(connection: socket.socket, end: bytes) -> bool:
    found = b""
    while end not in found:
        part = connection.recv(1 << 16)
        if not part:
            return False
        found += part
    return True


def request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return HEAD % len(data) + data
