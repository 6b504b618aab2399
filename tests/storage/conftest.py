"""A proxy in front of the store that counts bytes and drops connections."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest


class Proxy:
    """TCP proxy to an upstream address.

    `up` and `down` count the bytes sent to and received from the store. Once one of them reaches
    `cut_up` or `cut_down`, all connections are closed, and new ones are closed at once.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = (urlsplit(upstream).hostname, urlsplit(upstream).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.mend()
        threading.Thread(target=self._accept, daemon=True).start()

    def mend(self) -> None:
        self.up = self.down = 0
        self.cut_up = self.cut_down = 1 << 60

    @property
    def is_cut(self) -> bool:
        return self.up >= self.cut_up or self.down >= self.cut_down

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            store = socket.create_connection(self._upstream)
            with self._lock:
                self._open |= {client, store}
            for source, target, way in ((client, store, "up"), (store, client, "down")):
                threading.Thread(target=self._pump, args=(source, target, way), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                if self.is_cut:
                    break
                target.sendall(data)
        except OSError:
            pass
        with self._lock:
            ended = set(self._open) if self.is_cut else {source, target}
            self._open -= ended
        for end in ended:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.cut_up = 0
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def proxy(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Proxy through which the test reaches the store."""
    proxy = Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    yield proxy
    proxy.close()
