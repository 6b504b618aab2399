"""Runs a server and its gateway, and ends them when their owner has died.

    python -m lathe_serving.guard FD SHARED_MEMORY FOLDER COMMAND... [-- COMMAND...]

FD is one end of a socket pair. The guard writes the server's process id to it. When the other end
is closed, because the owner has died or gives up, the guard ends the server. After one byte from
the other end the server is detached, and the guard becomes its supervisor: if the server or one of
its backends crashes, it is restarted, and FOLDER's state file gets the new process id. SIGTERM to
the guard ends everything: first the gateway, which completes requests in flight, then the server.
At the end the server's regions in /dev/shm (names that begin with SHARED_MEMORY) are removed, and
remaining processes are killed.

The second command, the gateway, survives the server's crashes, and is restarted if it crashes
itself. If it ends with status 2, because its settings are invalid, the server ends too.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lathe_serving.stubs import clear_shared_memory, ended_stubs

GRACE_SECONDS = 10.0
GATEWAY_SECONDS = 5.0  # for the gateway to answer what it has
RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 60.0  # before it is started again
STUB_SECONDS = 2.0  # between two looks at its backends
LIFE_SECONDS = 60.0  # after which a crash is the first one again
WRONG_SETTINGS = 2


def main() -> None:
    """Run the guard, with the arguments of the command line."""
    fd, shared_memory, folder, *commands = sys.argv[1:]
    end = commands.index("--") if "--" in commands else len(commands)
    owner = socket.socket(fileno=int(fd))
    server = Server(commands[:end], shared_memory, Path(folder))
    gateway = GatewayProcess(commands[end + 1 :], server)

    def stop() -> None:
        gateway.stop()
        server.stop()

    # On a thread: the handler itself interrupts `server.run`, which may hold the very locks that
    # `stop` needs, and would wait for them forever.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=stop).start())
    threading.Thread(target=_watch, args=(owner, server, stop), daemon=True).start()
    server.run()
    gateway.stop()
    clear_shared_memory(shared_memory)
    os.killpg(os.getpid(), signal.SIGKILL)  # what is left of the gateway, and this process itself


class Server:
    """A command that is restarted after crashes, once `is_supervised`."""

    def __init__(self, command: list[str], shared_memory: str, folder: Path) -> None:
        self._command, self._shared_memory, self._folder = command, shared_memory, folder
        self.is_supervised = False
        self._is_over = threading.Event()
        self._restarts = 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def run(self) -> None:
        """Keep it running until it ends by itself or is stopped. Restarts never stop, because the
        cause of the crashes may go away; the delay doubles with each successive crash."""
        crashes, began = 0, time.monotonic()
        while (status := self._wait()) and self.is_supervised:
            self._kill_remaining()
            clear_shared_memory(self._shared_memory)
            crashes = crashes + 1 if time.monotonic() - began < LIFE_SECONDS else 1
            # 0, 1, 3, 7, ... seconds: after a single crash it starts again at once.
            wait = min(RESTART_SECONDS * (2 ** (crashes - 1) - 1), MAX_RESTART_SECONDS)
            _say(f"the server exited with status {status}, restarting in {wait:g} s")
            if self._is_over.wait(wait):
                return
            began = time.monotonic()
            self._process = self._start()
            self._restarts += 1
            # Clients and `stop` find the server by the process id in the state file.
            from lathe_base.errors import UserError  # only now: this process is to be small
            from lathe_serving.state import Process, read

            with suppress(UserError, OSError):  # the file is somebody else's; it has ended again
                if state := read(self._folder):
                    server = Process.of(self._process.pid)
                    new = {"server": server, "restarts": self._restarts}
                    state.model_copy(update=new).write(self._folder)
            if self._is_over.is_set():  # meanwhile
                self._process.terminate()
        self._kill_remaining()

    def _wait(self) -> int:
        """Wait until it ends, and kill it if one of its backends has died; returns its status."""
        ended = set[int]()
        while True:
            try:
                return self._process.wait(STUB_SECONDS)
            except subprocess.TimeoutExpired:
                before, ended = ended, ended_stubs(self._process.pid)
                if before & ended:  # twice in a row: Triton had time to notice, and did not
                    _say("a Python backend has died: killing the server")
                    self._process.kill()

    def stop(self) -> None:
        """End it, and wait."""
        self.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._is_over.set()
        self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, process_group=0)

    def _kill_remaining(self) -> None:
        with suppress(ProcessLookupError):  # the stubs of its Python models, which are in its group
            os.killpg(self._process.pid, signal.SIGKILL)


class GatewayProcess:
    """Keeps a gateway command running, on a thread; does nothing if the command is empty."""

    def __init__(self, command: list[str], server: Server) -> None:
        self._command, self._server = command, server
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        if command:
            threading.Thread(target=self._keep, daemon=True).start()

    def stop(self) -> None:
        """End it after it has completed the requests in flight."""
        self._is_over.set()
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GATEWAY_SECONDS)

    def _keep(self) -> None:
        while not self._is_over.is_set():
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            if self._process.wait() == WRONG_SETTINGS:
                self._server.terminate()
                return
            self._is_over.wait(RESTART_SECONDS)


def _watch(owner: socket.socket, server: Server, stop: Callable[[], None]) -> None:
    try:
        owner.sendall(f"{server.pid}\n".encode())
        server.is_supervised = bool(owner.recv(1))
    except OSError:
        pass
    if not server.is_supervised:
        stop()


def _say(what: str) -> None:
    print(f"lathe: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
