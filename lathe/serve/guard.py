"""Runs a server, and ends it when whoever asked for it is gone.

    python -m lathe.serve.guard FD SHARED_MEMORY COMMAND...

FD is one end of a socket pair. The guard writes the command's process id to it; when the other end
closes (its owner has died, or gives up) it ends the command. After one byte from the other end it
lets the command live, and only waits for it. When the command has ended, however that came, its
regions in /dev/shm are removed, those whose name begins with SHARED_MEMORY, and what it leaves of
its processes is killed, with the guard itself: it leads their group.
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
    """Remove what a killed server leaves in /dev/shm; the prefix is one that `SHARED_MEMORY` is."""
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
