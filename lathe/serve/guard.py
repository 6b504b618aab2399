"""Runs a command, and ends it when whoever asked for it is gone.

    python -m lathe.serve.guard FD COMMAND...

FD is one end of a socket pair. The guard writes the command's process id to it; when the other end
closes (its owner has died, or is done) it ends the command. After one byte from the other end it
lets the command live, and only waits for it.
"""

import socket
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0


def main() -> int:
    owner = socket.socket(fileno=int(sys.argv[1]))
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(owner, child), daemon=True).start()
    return child.wait()


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
    sys.exit(main())
