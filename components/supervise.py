"""A step that is killed starts again in its pod, from the state that it has saved.

Argo does not do it: as Pipelines configures it, only a lost pod is tried again
(`retryPolicy: OnError`), and a step whose process was killed, as for want of memory, fails the run.
"""

import os
import signal
import sys

CRASHED = 70
"""Exit status of a stage one of whose worker processes was killed; sysexits.h's EX_SOFTWARE."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(restarts: int, mark: str) -> None:
    """Go on in a child process; this one waits for it, and starts another if it is killed.

    Returns in the children only. This process exits with the status of the last one. Does nothing
    outside of a pod. Call it while there are no other threads.

    Args:
        restarts: how often at most.
        mark: opens every line that is printed.
    """
    if "POD_NAME" not in os.environ:
        return
    for left in range(restarts, -1, -1):
        sys.stdout.flush()
        sys.stderr.flush()
        if (child := os.fork()) == 0:
            return
        status, was_told_to_end = _wait(child)
        why = _crash(status)
        if why is None or was_told_to_end or not left:
            if why:
                print(f"{mark}error: the step {why}; restarts left: {left}", flush=True)
            break
        print(f"{mark}the step {why}: starting it again; restarts left: {left - 1}", flush=True)
    os._exit(status if status >= 0 else 128 - status)


def _wait(child: int) -> tuple[int, bool]:
    """The child's exit status, negative for a signal, and whether it was told to end."""
    told: list[int] = []

    def forward(number: int, _: object) -> None:
        told.append(number)
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), bool(told)


def _crash(status: int) -> str | None:
    """What happened, if the work may succeed when it is repeated."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does for want of memory"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return "lost a worker process" if status == CRASHED else None
