"""Identifies a process reliably: the kernel may reuse its PID for another one."""

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Process(BaseModel):
    """A process of this machine, identified by its PID and start time.

    Attributes:
        pid: its PID.
        started: its start time, in clock ticks since boot.
        boot: the id of that boot.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: int = Field(gt=1, le=2**22)  # the kernel's PID_MAX_LIMIT
    started: int = Field(gt=0)
    boot: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this PID now.

        Raises:
            OSError: there is none.
        """
        return cls(pid=pid, started=_started(pid), boot=BOOT.read_text(encoding="utf-8").strip())

    @contextmanager
    def held(self, is_right: Callable[[Sequence[str]], bool]) -> Iterator[int | None]:
        """Yield a pidfd of the process, which never refers to another one; None if the process has
        ended, or `is_right` rejects its command line."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        # What is read now is from this process, or from a successor that differs.
        try:
            command = os.fsdecode(Path(f"/proc/{self.pid}/cmdline").read_bytes()).split("\0")
            is_there = Process.of(self.pid) == self and is_right(command)
        except (OSError, ValueError):
            is_there = False
        try:
            yield descriptor if is_there else None
        finally:
            os.close(descriptor)


def send(descriptor: int, number: signal.Signals) -> None:
    """Send a signal to the process of a pidfd, unless it has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def ends_within(descriptor: int, seconds: float) -> bool:
    """Wait for the process of a pidfd; return whether it ended in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _started(pid: int) -> int:
    """Field 22 of the process's stat file; its name, field 2, is arbitrary but ends with `)`."""
    fields = (
        Path(f"/proc/{pid}/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])
