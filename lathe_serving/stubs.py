"""What dying processes of Triton leave behind: Python backends that it does not miss, and shared
memory. Has few imports, because the guard of a server should be a small process.

Triton 2.51 continues without a backend that has died, reports that it is ready, and answers every
request to that model with an error.

    python -m lathe_serving.stubs PORT

is the Deployment's liveness probe, within Triton's container: the exit status is 1 if one has died,
or if the Triton whose HTTP is on that port does not live.
"""

import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

NAME = "(triton_python_b)"  # the kernel keeps 15 characters of it
PROBE_SECONDS = 4.0
AGAIN_SECONDS = 1.0
"""After this long, Triton is not about to reap a backend that has ended."""

SHARED_MEMORY = re.compile(r"lathe_[0-9a-f]{12}")
"""The names of one server's regions begin with this."""


def ended_stubs(parent: int) -> set[int]:
    """Ended backends of the Triton `parent` that it has not noticed."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            continue  # it has gone meanwhile
        # A zombie that its parent has not reaped. A live stub, or one of another Triton, is none.
        if words[1:3] == [NAME, "Z"] and parent == int(words[3]):
            pids.add(int(words[0]))
    return pids


def clear_shared_memory(prefix: str) -> None:
    """Remove the regions that a killed server leaves in /dev/shm.

    Raises:
        ValueError: the prefix does not match `SHARED_MEMORY`.
    """
    if not SHARED_MEMORY.fullmatch(prefix):
        raise ValueError(f"{prefix!r} is not a server's")
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def main() -> int:
    """Run the command line; returns the exit status."""
    address = f"http://127.0.0.1:{sys.argv[1]}/v2/health/live"
    try:
        build_opener(ProxyHandler({})).open(address, timeout=PROBE_SECONDS).close()
    except OSError as error:
        print(f"{address}: {error}")
        return 1
    option, triton = f"--http-port={sys.argv[1]}".encode(), 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has gone meanwhile
            if option in path.read_bytes().split(b"\0"):
                triton = int(path.parent.name)
                break
    if ended := ended_stubs(triton):
        time.sleep(AGAIN_SECONDS)
        ended &= ended_stubs(triton)
    if ended:
        print(f"a Python backend has died: process {min(ended)}")
    return int(bool(ended))


if __name__ == "__main__":
    sys.exit(main())
