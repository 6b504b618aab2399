"""Detects dead Python backends of Triton: Triton 2.51 continues without them, reports that it is
ready, and answers every request to that model with an error.

    python -m lathe_serving.stubs PORT

is the Deployment's liveness probe, within Triton's container: the exit status is 1 if one has died,
or if the Triton whose HTTP is on that port does not live.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

NAME = "(triton_python_b)"  # the kernel keeps 15 characters of it
PROBE_SECONDS = 4.0
AGAIN_SECONDS = 1.0
"""After this long, Triton is not about to reap a backend that has ended."""


def ended_stubs(parent: int) -> set[int]:
    """Ended backends of the Triton `parent` that it has not noticed."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            continue  # it has gone meanwhile
        if words[1:3] == [NAME, "Z"] and parent == int(words[3]):
            found.add(int(words[0]))
    return found


def triton_of(port: str) -> int:
    """The PID of the Triton whose HTTP is on a port; 0 if there is none."""
    option = f"--http-port={port}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has gone meanwhile
            if option in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    return 0


def main() -> int:
    """Run the command line; returns the exit status."""
    address = f"http://127.0.0.1:{sys.argv[1]}/v2/health/live"
    try:
        build_opener(ProxyHandler({})).open(address, timeout=PROBE_SECONDS).close()
    except OSError as error:
        print(f"{address}: {error}")
        return 1
    triton = triton_of(sys.argv[1])
    if ended := ended_stubs(triton):
        time.sleep(AGAIN_SECONDS)
        ended &= ended_stubs(triton)
    if ended:
        print(f"a Python backend has died: process {min(ended)}")
    return int(bool(ended))


if __name__ == "__main__":
    sys.exit(main())
