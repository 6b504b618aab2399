"""Processes that never outlive the one that started them, even if it is killed (Linux only), and
termination signals while there are processes or pods to end.

`python lathe_launch/parent.py PARENT COMMAND...` replaces itself with COMMAND, set up so that the
kernel kills it when the process PARENT, which started it, ends: see `tied`.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIED = "LATHE_TIED"
"""Environment variable of a tied command: its process id, for processes that a shell starts."""
TERMINATION = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def tied(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it is killed when this process ends.

    The kernel watches the thread that starts it, so that thread must wait for it.
    """
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Args:
        parent: process that started this one; it may already have ended.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_tied_shell() -> None:
    """If a tied shell started this process, ask the kernel to kill it when the shell ends.

    Does nothing elsewhere, such as in a pod, whose launcher's threads come and go.
    """
    shell = int(os.environ.pop(TIED, 0))
    if shell not in (0, os.getpid()):  # equal: the shell has replaced itself with this process
        die_with_parent(shell)


def report_preemption(message: str) -> None:
    """Tell the elastic agent that started this process, if one did, that its state is saved: in the
    error file that torch's `ProcessFailure` reads."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": message, "timestamp": int(time.time())}
        Path(path).write_text(json.dumps(report), encoding="utf-8")


@contextmanager
def first_signal_raises(
    error: Callable[[int], BaseException], numbers: Sequence[int] = TERMINATION
) -> Iterator[None]:
    """The first of these signals raises `error(number)`; later ones are ignored until the block
    ends, so that they do not interrupt its cleanup."""

    def handler(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise error(number)

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ[TIED] = str(os.getpid())
    os.execvp(sys.argv[2], sys.argv[2:])
