"""Run a worker command on local processes, as one node or as several on the loopback interface."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lathe.errors import Preempted, UserError
from lathe.launch.node import HANDLED, LOOPBACK, Node, run_node
from lathe.launch.parent import tied
from lathe.launch.shape import Shape, WorkerFailed

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 5.0  # beyond what the nodes themselves give their workers


def launch(command: Sequence[str], shape: Shape, grace_seconds: int = 30) -> None:
    """Run `python -m lathe <command>` in every process of `shape` and wait for all.

    All processes are on this machine, in one group on the loopback interface, and find their
    place in torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
    The first failure stops the others. A signal to end goes on to the workers, which have
    `grace_seconds` to save and end; none outlives this call. Call it from the main thread, which
    is where Python delivers signals.

    Raises:
        WorkerFailed: with the rank that failed first.
        Preempted: SIGTERM came, and every worker saved its state.
        SystemExit: on other signals, or SIGTERM that a worker did not take in time, with the
            shell's status, 128 + signal.
    """
    run(["-m", "lathe", *command], shape, grace_seconds)


def run(arguments: Sequence[str], shape: Shape, grace_seconds: int = 30) -> None:
    """As `launch`, for any arguments of this Python."""
    if shape.nodes == 1:
        run_node(arguments, Node(shape), grace_seconds)
        return
    with tempfile.TemporaryDirectory(prefix="lathe-nodes-") as outcomes:
        _Nodes(arguments, shape, grace_seconds, Path(outcomes)).run()


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


class _Nodes:
    """Nodes that are processes of this machine, each in a process group of its own."""

    def __init__(
        self, arguments: Sequence[str], shape: Shape, grace_seconds: int, outcomes: Path
    ) -> None:
        self.arguments, self.shape, self.grace_seconds = arguments, shape, grace_seconds
        self.outcomes = [outcomes / str(rank) for rank in range(shape.nodes)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        with _signals_raised():
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
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = int(free.getsockname()[1])
        for rank, outcome in enumerate(self.outcomes):
            command = [sys.executable, "-u", "-m", "lathe.launch.node"]
            command += [str(outcome), str(self.grace_seconds), *self.arguments]
            environment = os.environ | Node(self.shape, rank, LOOPBACK, port).environment()
            self.processes.append(
                subprocess.Popen(tied(command), env=environment, start_new_session=True)
            )

    def _first_failure(self) -> int | None:
        """Wait; the node that ended badly first, None when all ended well."""
        while True:
            statuses = [process.poll() for process in self.processes]
            for rank, status in enumerate(statuses):
                if status:
                    return rank
            if all(status == 0 for status in statuses):
                return None
            time.sleep(POLL_SECONDS)

    def _end(self, number: int) -> None:
        """Ask every node to end, wait, and kill what is left of their groups."""
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
            raise WorkerFailed(first, status, f"(node {rank} ended before its workers)")
        raise WorkerFailed(**min(failures, key=_suspicion))

    def _raise_if_preempted(self) -> None:
        """Preempted is what every node says: otherwise a part of the state may be missing."""
        said = [outcome.get("preempted") for outcome in self._outcomes()]
        if len(said) == self.shape.nodes and all(said):
            raise Preempted(said[0])

    def _outcomes(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_text(encoding="utf-8")) for path in self.outcomes if path.is_file()
        ]


def _suspicion(failure: dict[str, Any]) -> int:
    """Who failed first, of nodes that end within a moment: the others lost their peer, which is an
    ordinary error (or SIGABRT); who was killed, or tells the user something, did not."""
    code = failure["exit_code"]
    if code == UserError.status or (code < 0 and code != -signal.SIGABRT):
        return 0
    return 1


@contextmanager
def _signals_raised() -> Iterator[None]:
    """A signal to end raises `_Signalled` once; further ones wait until the block is left."""

    def handler(number: int, frame: object) -> None:
        for name in HANDLED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        raise _Signalled(number)

    before = {name: signal.signal(getattr(signal, name), handler) for name in HANDLED}
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(getattr(signal, name), old)
