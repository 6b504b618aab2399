"""Run a worker command on processes of this machine: of one node, or of several on the loopback
interface."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe_base.config.settings import Recipe
from lathe_base.errors import Preempted, UserError
from lathe_base.ports import LOOPBACK, free_port
from lathe_launch.memory import require_processes
from lathe_launch.node import Node, run_node, this_node
from lathe_launch.parent import die_with_parent, tied
from lathe_launch.shape import POD_GRACE_SECONDS, Shape, WorkerFailed, required_shape
from lathe_launch.signals import first_signal_raises
from lathe_launch.usage import leave_usage

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 5.0  # added to the grace period that nodes give their workers

EXIT_SECONDS = 10
"""Seconds of the pod's termination grace period reserved for the node process after its workers
exit."""


def start_workers(command: Sequence[str], recipe: Recipe) -> bool:
    """Run `lathe <command>` in the processes that the recipe requires, and wait for them.

    In a multi-node job (torchrun's PET_* environment, which Kubeflow's Trainer sets) these are this
    node's processes, otherwise all of them, on this machine.

    Returns:
        False if one process is enough, or if this process is itself a worker: the caller then does
        the work in this process.

    Raises:
        UserError: see `required_shape` and `require_processes`.
        WorkerFailed, Preempted: see `launch`.
    """
    if "RANK" in os.environ:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        return False
    if node := this_node():
        arguments = ["-m", "lathe", *command]
        try:
            run_node(arguments, node, POD_GRACE_SECONDS - EXIT_SECONDS)
        finally:
            leave_usage()
        return True
    shape = required_shape(recipe)
    if shape.processes == 1:
        return False
    require_processes(shape.processes)
    launch(command, shape, recipe.Distributed.grace_seconds)
    return True


def launch(command: Sequence[str], shape: Shape, grace_seconds: int = 30) -> None:
    """Run `python -m lathe <command>` in every process of `shape` and wait for all.

    All processes run on this machine, in one group on the loopback interface, with torchrun's
    environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The first
    failure stops the others. Termination signals are forwarded to the workers, which have
    `grace_seconds` to save their state and exit; none outlives this call. Call it from the main
    thread, where Python delivers signals.

    Raises:
        WorkerFailed: with the rank that failed first.
        Preempted: SIGTERM was received and every worker saved its state.
        SystemExit: on other signals, or if a worker did not exit in time after SIGTERM, with the
            shell's status, 128 + signal.
    """
    run(["-m", "lathe", *command], shape, grace_seconds)


def run(arguments: Sequence[str], shape: Shape, grace_seconds: int = 30) -> None:
    """Like `launch`, with any arguments for this Python."""
    if shape.nodes == 1:
        run_node(arguments, Node(shape), grace_seconds)
        return
    with tempfile.TemporaryDirectory(prefix="lathe-nodes-") as outcomes:
        _Nodes(arguments, shape, grace_seconds, Path(outcomes)).run()


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


class _Nodes:
    """Nodes as processes of this machine, each in its own process group."""

    def __init__(
        self, arguments: Sequence[str], shape: Shape, grace_seconds: int, outcomes: Path
    ) -> None:
        self.arguments, self.shape, self.grace_seconds = arguments, shape, grace_seconds
        self.outcomes = [outcomes / str(rank) for rank in range(shape.nodes)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        with first_signal_raises(_Signalled):
            try:
                self._start()
                failed = self._first_failure()
            except _Signalled as signalled:
                self._end(signalled.number)
                self._raise_if_preempted()
                raise SystemExit(128 + signalled.number) from None
            except BaseException:
                self._end(signal.SIGTERM)
                raise
            self._end(signal.SIGTERM)
        if failed is not None:
            self._raise_failure(failed)

    def _start(self) -> None:
        port = free_port()
        for rank, outcome in enumerate(self.outcomes):
            command = [sys.executable, "-u", "-m", "lathe_launch.node"]
            command += [str(outcome), str(self.grace_seconds), *self.arguments]
            environment = os.environ | Node(self.shape, rank, LOOPBACK, port).environment()
            self.processes.append(
                subprocess.Popen(tied(command), env=environment, start_new_session=True)
            )

    def _first_failure(self) -> int | None:
        """Wait for all nodes; the first that failed, or None."""
        while True:
            statuses = [process.poll() for process in self.processes]
            for rank, status in enumerate(statuses):
                if status:
                    return rank
            if all(status == 0 for status in statuses):
                return None
            time.sleep(POLL_SECONDS)

    def _end(self, number: int) -> None:
        """Terminate every node, wait, and kill what is left of their process groups."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(number)
        deadline = time.monotonic() + self.grace_seconds + PATIENCE_SECONDS
        while any(p.poll() is None for p in running) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()

    def _raise_failure(self, rank: int) -> None:
        self._raise_if_preempted()
        failures = [o for o in self._outcomes() if "preempted" not in o]
        if not failures:
            first = rank * self.shape.processes_per_node
            status = self.processes[rank].returncode
            raise WorkerFailed(first, status, f"(node {rank} exited before its workers)")

        # Of nodes that ended at nearly the same time, a worker that was killed or raised a
        # UserError is the cause; the others lost their peer and have an ordinary error or SIGABRT.
        def is_effect(failure: dict[str, Any]) -> bool:
            code = failure["exit_code"]
            killed = code < 0 and code != -signal.SIGABRT
            return not killed and code != UserError.status

        raise WorkerFailed(**min(failures, key=is_effect))

    def _raise_if_preempted(self) -> None:
        """Raise Preempted only if every node reports it: otherwise the saved state may be
        incomplete."""
        said: list[str] = [outcome.get("preempted", "") for outcome in self._outcomes()]
        if len(said) == self.shape.nodes and all(said):
            raise Preempted(said[0])

    def _outcomes(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_text(encoding="utf-8")) for path in self.outcomes if path.is_file()
        ]
