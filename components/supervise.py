"""Runs a step in a child process, and restarts it in its pod if it is killed.

    python3 -m components.supervise -m kfp.dsl.executor_main ...

The step resumes from its saved state. Argo would not restart it: as configured by Pipelines, it
only retries lost pods (`retryPolicy: OnError`), and a step whose process was killed, for instance
when out of memory, fails the run.

The supervisor is a separate program rather than a fork of the step, whose libraries start threads
when imported: a fork of onnxruntime waits at exit for threads that only its parent has, and aborts
or hangs.
"""

import os
import signal
import subprocess
import sys
from typing import Any

from lathe_launch.parent import die_with_tied_shell, tied

MARK = "[lathe] "
"""Prefix of Lathe's own log lines, to distinguish them from KFP's."""

CRASHED = 70
"""Exit status of a stage that lost a worker process; sysexits.h's EX_SOFTWARE."""

UNAVAILABLE = 69
"""Exit status of `lathe_base.errors.Unavailable`, without importing it."""

FAILURES = {CRASHED: "lost a worker process", UNAVAILABLE: "a server did not answer"}

RESTARTS = "LATHE_RESTARTS_FD"
"""Environment variable of a supervised step: the file descriptor that `allow_restarts` writes."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXECUTOR = "python3 -m kfp.dsl.executor_main"
"""The command with which KFP's script runs a component."""


def supervised(component: Any) -> Any:
    """Decorator for a KFP component whose steps run under this module's supervisor.

    Raises:
        ValueError: this version of KFP runs components differently.
    """
    container = component.component_spec.implementation.container
    entrypoint = EXECUTOR.replace("-m", f"-m {__spec__.name} -m", 1)
    command = [part.replace(EXECUTOR, entrypoint) for part in container.command]
    if command == container.command:
        raise ValueError(f"{component.name}: KFP no longer runs components with {EXECUTOR!r}")
    container.command = command
    return component


def allow_restarts(number: int) -> None:
    """Tell the supervisor, if there is one, how often it may restart this step."""
    if descriptor := os.environ.pop(RESTARTS, None):
        with open(int(descriptor), "w") as pipe:
            pipe.write(str(number))


def main() -> None:
    """Run Python with the arguments of this command; outside of a pod, replace this process by
    it."""
    command = [sys.executable, *sys.argv[1:]]
    if "POD_NAME" not in os.environ:
        os.execv(sys.executable, command)
    die_with_tied_shell()
    status = _Supervisor(command).run()
    sys.exit(status if status >= 0 else 128 - status)


class _Supervisor:
    """Runs a command in a process that ends with this one and gets its signals."""

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
            # What may succeed when it is retried; all else is the step's own result.
            why = FAILURES.get(status)
            if status == -signal.SIGKILL:
                why = "was killed by SIGKILL, as the kernel does when it runs out of memory"
            elif status < 0:
                why = f"was killed by {signal.Signals(-status).name}"
            if why is None or self._was_told_to_end:
                return status
            left = max(allowed - restarts, 0)
            if not left:
                code = "unreachable" if status == UNAVAILABLE else "killed"
                print(f"{MARK}error[{code}]: the step {why}; restarts left: 0", flush=True)
                return status
            restarts += 1
            print(f"{MARK}the step {why}: restarting; restarts left: {left - 1}", flush=True)

    def _attempt(self) -> tuple[int, int]:
        """Run once; returns the exit status, and the number of restarts that the step has
        allowed."""
        # The step says how often through a pipe: only it has read the recipe.
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
        """Pass the first signal on; a second one would interrupt what the first has begun."""
        if self._step and not self._was_told_to_end:
            self._step.send_signal(number)
        self._was_told_to_end = True


if __name__ == "__main__":
    main()
