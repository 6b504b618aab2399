"""Pods of the fake Kubernetes that run real Triton servers on releases from a real store, and the
Service in front of them."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lathe_base.config.settings import ServingSettings
from lathe_base.storage import fetch
from lathe_serving.server import ANY_PORTS, TritonServer, start
from tests.support.fake_deployments import Deployments

SERVING = ServingSettings(**ANY_PORTS)


@dataclass
class Triton:
    """A Triton server that stops once its last connection is closed."""

    server: TritonServer
    connections: set[socket.socket] = field(default_factory=set)

    def stop(self) -> None:
        while self.connections:
            time.sleep(0.02)
        self.server.stop()


class Program:
    """Program of the pods, each with its own folder in `folder`.

    Attributes:
        refuses: release that fails to start, if any.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock, self._started = folder, threading.Lock(), 0
        self.refuses: str | None = None

    def __call__(self, release: str) -> Triton:
        with self._lock:
            self._started += 1
            pod = self.folder / str(self._started)
        if release == self.refuses:
            raise OSError("no space left in /models")
        repository = fetch(release, pod / "models")
        return Triton(start(repository, SERVING, pod / "state"))


class Service:
    """Forwards each new connection to the next ready pod, in turn."""

    def __init__(self, controller: Deployments) -> None:
        self._controller, self._turn = controller, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._turn += 1
                ready = self._controller.ready
                served = ready[self._turn % len(ready)].served
                assert isinstance(served, Triton)
                served.connections.add(connection)
                threading.Thread(target=_join, args=(connection, served), daemon=True).start()


def _join(connection: socket.socket, served: Triton) -> None:
    port = served.server.state.http_port
    with connection, socket.create_connection(("127.0.0.1", port)) as upstream:
        thread = threading.Thread(target=_pump, args=(connection, upstream), daemon=True)
        thread.start()
        _pump(upstream, connection)
        thread.join()
    served.connections.discard(connection)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
