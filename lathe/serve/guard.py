"""Run a server, and end it when its owner is gone.

    python -m lathe.serve.guard FD SHARED_MEMORY COMMAND... [-- COMMAND...]

FD is one end of a socket pair. The guard writes the command's process id to it. When the other end
is closed, because the owner has died or gives up, the guard ends the command. After one byte from
the other end, the command is detached: the guard only waits for it. When the command has ended for
any reason, its regions in /dev/shm (names that begin with SHARED_MEMORY) are removed, and its
remaining processes are killed together with the guard, which leads their process group.

The second command, the gateway, runs for as long as the first one: it is started again when it
crashes. If it ends with status 2, because its settings are wrong, so does the server.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 10.0
GATEWAY_SECONDS = 2.0  # for the gateway to end after the server
RESTART_SECONDS = 1.0
WRONG_SETTINGS = 2
SHARED_MEMORY = re.compile(r"lathe_[0-9a-f]{12}")


def main() -> None:
    """Run the guard, with the arguments of the command line."""
    fd, shared_memory, *commands = sys.argv[1:]
    end = commands.index("--") if "--" in commands else len(commands)
    owner = socket.socket(fileno=int(fd))
    child = subprocess.Popen(commands[:end], stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(owner, child), daemon=True).start()
    gateway = Gateway(commands[end + 1 :], child)
    child.wait()
    gateway.stop()
    clear_shared_memory(shared_memory)
    os.killpg(os.getpid(), signal.SIGKILL)


class Gateway:
    """Keeps a command running beside a server, on a thread; an empty command is none."""

    def __init__(self, command: list[str], server: subprocess.Popen[bytes]) -> None:
        self._command, self._server = command, server
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        if command:
            self._thread.start()

    def stop(self) -> None:
        """End it: what it has received from the server still goes to its clients."""
        self._over.set()
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GATEWAY_SECONDS)

    def _keep(self) -> None:
        while not self._over.is_set():
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            if self._process.wait() == WRONG_SETTINGS:
                self._server.terminate()
                return
            self._over.wait(RESTART_SECONDS)


def clear_shared_memory(prefix: str) -> None:
    """Remove what a killed server leaves in /dev/shm.

    Raises:
        ValueError: the prefix does not match `SHARED_MEMORY`.
    """
    if not SHARED_MEMORY.fullmatch(prefix):
        raise ValueError(f"{prefix!r} is not a server's")
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _watch(owner: socket.socket, child: subprocess.Popen[bytes]) -> None:
    try:
        owner.sendall(f"{child.pid}\n".encode())
        released = owner.recv(1)
    except OSError:
        released = b""
    if not released:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


if __name__ == "__main__":
    main()
