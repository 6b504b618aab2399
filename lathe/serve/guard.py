"""Run a server, and end it when its owner is gone.

    python -m lathe.serve.guard FD SHARED_MEMORY COMMAND...

FD is one end of a socket pair. The guard writes the command's process id to it. When the other end
is closed, because the owner has died or gives up, the guard ends the command. After one byte from
the other end, the command is detached: the guard only waits for it. When the command has ended for
any reason, its regions in /dev/shm (names that begin with SHARED_MEMORY) are removed, and its
remaining processes are killed together with the guard, which leads their process group.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

GRACE_SECONDS = 10.0
SHARED_MEMORY = re.compile(r"lathe_[0-9a-f]{12}")


def main() -> None:
    """Run the guard, with the arguments of the command line."""
    fd, shared_memory, *command = sys.argv[1:]
    owner = socket.socket(fileno=int(fd))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(owner, child), daemon=True).start()
    child.wait()
    clear_shared_memory(shared_memory)
    os.killpg(os.getpid(), signal.SIGKILL)


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
