"""This machine's memory, as far as the process may use it."""

import os
from collections.abc import Iterator
from pathlib import Path

from lathe_base.errors import Code, UserError

CGROUP = Path("/sys/fs/cgroup")
PROCESS = 128e6  # bytes: less than torch itself takes of its own
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2 and v1


def require_processes(count: int) -> None:
    """Check that this machine can run this many training processes.

    Raises:
        UserError: torch alone would fill its memory.
    """
    available = machine_memory()
    if count * PROCESS > available:
        raise UserError(
            f"Distributed asks for {count} processes on this machine, which has "
            f"{available / 1e9:,.0f} GB, enough for at most {available // PROCESS:.0f} even "
            "without a model",
            "lower the degrees, or distribute the processes over several machines with "
            "Launch.nodes",
            Code.OUT_OF_MEMORY,
        )


def machine_memory() -> int:
    """Memory in bytes of this machine, as far as the process's cgroups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def cgroup_limits(
    root: Path = CGROUP, cgroup_file: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Memory limits in bytes of the process's cgroup and its ancestors."""
    try:
        lines = cgroup_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield from _cgroup_limits(folder)


def _cgroup_limits(folder: Path) -> Iterator[int]:
    for name in LIMITS:
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():  # else "max"
            yield int(text)
