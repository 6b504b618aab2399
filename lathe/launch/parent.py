"""A process that does not outlive the one that started it, even one that is killed; Linux only.

`python lathe/launch/parent.py PARENT COMMAND...` runs COMMAND in its own place, so that the kernel
kills it when the process PARENT, which starts it, has ended: see `tied`.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIED = "LATHE_TIED"
"""Environment variable of a tied command: its process id, for what a shell starts in its turn."""


def tied(command: Sequence[str]) -> list[str]:
    """The command, run so that it is killed when this process ends.

    The kernel watches the thread that starts it: that one has to wait for it.
    """
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: the process that started this one, which may have ended already.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_tied_shell() -> None:
    """Where a tied shell has started this process, have the kernel kill it when the shell ends.

    Elsewhere, as in a pod, whose launcher's threads come and go, nothing is done.
    """
    shell = int(os.environ.pop(TIED, 0))
    if shell not in (0, os.getpid()):  # this process: the shell has left its place to it
        end_with_parent(shell)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.environ[TIED] = str(os.getpid())
    os.execvp(sys.argv[2], sys.argv[2:])
