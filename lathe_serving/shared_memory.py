"""A server's shared memory regions, which a killed Triton leaves behind. Has few imports, because
the guard of a server should be a small process."""

import re
from pathlib import Path

SHARED_MEMORY = re.compile(r"lathe_[0-9a-f]{12}")
"""The names of one server's regions begin with this."""


def clear_shared_memory(prefix: str) -> None:
    """Remove the regions that a killed server leaves in /dev/shm.

    Raises:
        ValueError: the prefix does not match `SHARED_MEMORY`.
    """
    if not SHARED_MEMORY.fullmatch(prefix):
        raise ValueError(f"{prefix!r} is not a server's")
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
