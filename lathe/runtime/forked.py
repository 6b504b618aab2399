"""Try work that a stranger's input may make endless, huge or fatal in a process of its own.

A fork has all that the work needs, and shares its memory. It ends with the work, so that the locks
which other threads hold at the time of the fork can hold up nobody but itself.
"""

import faulthandler
import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_SECONDS = 1
WALL_SECONDS = 5.0
MEMORY = 256 * 2**20  # bytes, beyond what the process has already


class TooMuch(Exception):
    """The work ended the process, or took more than it may."""


def try_out(work: Callable[[], str]) -> str:
    """What the work returns.

    Raises:
        TooMuch: the process ended without an answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(work, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as answers:
            ready, _, _ = select.select([answers], [], [], WALL_SECONDS)
            found = answers.read() if ready else b""
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not found:
        raise TooMuch
    return found[1:].decode(errors="replace")


def _answer(work: Callable[[], str], writer: int) -> None:
    """In the fork: never returns."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        found = work().encode(errors="replace")
        os.write(writer, b"+" + found[: select.PIPE_BUF - 1])
    finally:
        os._exit(0)
