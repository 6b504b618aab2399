"""A load balancer in front of several gateways that polls their readiness."""

import re
import socket
import threading
import time
from contextlib import suppress

import requests

from lathe_serving.state import HOST

POLL_SECONDS = 0.05


class Balancer:
    """Forwards each request, one per connection, to a ready gateway in turn.

    A request that gets no response, or a 503, is retried on the next gateway.
    """

    def __init__(self) -> None:
        self.ready: set[int] = set()
        self._ports: set[int] = set()
        self._turn = 0
        self._socket = socket.create_server((HOST, 0))
        self.address = f"http://{HOST}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._probe, daemon=True).start()

    def add(self, port: int) -> None:
        """Add the gateway on this port as a backend."""
        self._ports.add(port)

    def close(self) -> None:
        self._ports.clear()
        self._socket.close()

    def _probe(self) -> None:
        while self._socket.fileno() >= 0:
            for port in list(self._ports):
                ready = False
                with suppress(requests.RequestException):
                    ready = requests.get(f"http://{HOST}:{port}/health", timeout=2).ok
                (self.ready.add if ready else self.ready.discard)(port)
            time.sleep(POLL_SECONDS)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            request = _request(connection)
            for _ in range(20):
                ports = sorted(self.ready)
                self._turn += 1
                if ports and _forward(request, ports[self._turn % len(ports)], connection):
                    return
                time.sleep(POLL_SECONDS)


def _request(connection: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)
    return head + b"\r\nConnection: close\r\n\r\n" + body


def _forward(request: bytes, port: int, connection: socket.socket) -> bool:
    """Forward a request and relay its response; False if there is none, or a 503."""
    try:
        with socket.create_connection((HOST, port)) as upstream:
            upstream.sendall(request)
            part = upstream.recv(1 << 16)
            if not part or part.startswith(b"HTTP/1.1 503"):
                return False
            while part:
                connection.sendall(part)
                part = upstream.recv(1 << 16)
    except OSError:
        return False
    return True
