"""Run a step in a process of its own, and start it again in its pod if it is killed.

    python3 -m components.supervise -m kfp.dsl.executor_main ...

The step resumes from the state that it has saved. Argo does not start it again: as Pipelines
configures it, only a lost pod is tried again (`retryPolicy: OnError`), and a step whose process was
killed, as for want of memory, fails the run.

The supervisor is not a fork of the step, whose libraries start threads when they are imported: a
fork of onnxruntime waits at exit for threads that only its parent has, and aborts or never ends.
"""

import os
import signal
import subprocess
import sys
from typing import Any

from lathe.launch.parent import end_with_tied_shell, tied

MARK = "[lathe] "
"""Opens every line that is Lathe's own, so that a reader can pick it out of KFP's."""

CRASHED = 70
"""Exit status of a stage one of whose worker processes was killed; sysexits.h's EX_SOFTWARE."""

UNAVAILABLE = 69
"""Exit status of `lathe.errors.Unavailable`, which this process need not import."""

RESTARTS = "LATHE_RESTARTS_FD"
"""Environment variable of a supervised step: the file descriptor that `allow_restarts` writes."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


EXECUTOR = "python3 -m kfp.dsl.executor_main"
"""The line by which KFP's script runs a component."""


def supervised(component: Any) -> Any:
    """Decorate a component of KFP, so that its steps run under this module's supervisor.

    Raises:
        ValueError: this version of KFP runs components in another way.
    """
    container = component.component_spec.implementation.container
    own = EXECUTOR.replace("-m", f"-m {__spec__.name} -m", 1)
    command = [part.replace(EXECUTOR, own) for part in container.command]
    if command == container.command:
        raise ValueError(f"{component.name}: KFP no longer runs components with {EXECUTOR!r}")
    container.command = command
    return component


def allow_restarts(number: int) -> None:
    """Tell the supervisor, if there is one, how often it may start this step again."""
    if descriptor := os.environ.pop(RESTARTS, None):
        with open(int(descriptor), "w") as pipe:
            pipe.write(str(number))


def main() -> None:
    """Run Python with the arguments of this command; outside of a pod, become it."""
    command = [sys.executable, *sys.argv[1:]]
    if "POD_NAME" not in os.environ:
        os.execv(sys.executable, command)
    end_with_tied_shell()
    status = _Supervisor(command).run()
    sys.exit(status if status >= 0 else 128 - status)


class _Supervisor:
    """Runs a command in a process that ends with this one and is sent the signals that it gets."""

    def __init__(self, command: list[str]) -> None:
        self._command, self._was_told_to_end = command, False
        self._step: subprocess.Popen[bytes] | None = None
        for number in FORWARDED:
            signal.signal(number, self._forward)

    def run(self) -> int:
        """Returns the exit status of the last attempt, negative for a signal."""
        restarts = 0
        while True:
            status, allowed = self._attempt()
            why = _crash(status)
            if why is None or self._was_told_to_end:
                return status
            left = max(allowed - restarts, 0)
            if not left:
                print(f"{MARK}error: the step {why}; restarts left: 0", flush=True)
                return status
            restarts += 1
            print(f"{MARK}the step {why}: restarting; restarts left: {left - 1}", flush=True)

    def _attempt(self) -> tuple[int, int]:
        """The exit status, and how many restarts the step has allowed before it ended."""
        read, write = os.pipe()
        environment = {**os.environ, RESTARTS: str(write)}
        self._step = subprocess.Popen(tied(self._command), env=environment, pass_fds=[write])
        os.close(write)
        if self._was_told_to_end:  # meanwhile
            self._step.terminate()
        status = self._step.wait()
        os.set_blocking(read, False)  # a process that the step has left may hold the other end
        with open(read) as pipe:
            return status, int(pipe.read() or 0)

    def _forward(self, number: int, _: object) -> None:
        self._was_told_to_end = True
        if self._step:
            self._step.send_signal(number)


def _crash(status: int) -> str | None:
    """Describe the failure, if the work may succeed when it is retried."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does when it runs out of memory"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    known = {CRASHED: "lost a worker process", UNAVAILABLE: "a server did not answer"}
    return known.get(status)


if __name__ == "__main__":
    main()
