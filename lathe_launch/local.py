"""Run a worker command in processes of this machine, under torch's elastic agent, which torchrun
wraps: one agent for each node. Several nodes on this machine meet on the loopback interface.

`start_workers` is the door; `python -m lathe_launch.local OUTCOME GRACE ARGUMENT...` is one node of
several on this machine.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, Preempted, StageError, UserError
from lathe_base.ports import LOOPBACK, free_port
from lathe_base.storage import atomic_file
from lathe_launch.parent import TERMINATION, die_with_parent, first_signal_raises, tied
from lathe_launch.shape import (
    POD_GRACE_SECONDS,
    SCHEDULING_SECONDS,
    Shape,
    WorkerFailed,
    required_shape,
)
from lathe_launch.usage import leave_usage, require_processes

log = logging.getLogger("lathe")

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 5.0  # added to the grace period that nodes give their workers
EXIT_SECONDS = 10
"""Seconds of the pod's termination grace period reserved for the node process after its workers
exit."""
TAIL_LINES = 20
UNUSED = signal.SIGUSR2
"""A signal for the agent, which insists on handling one."""
RENDEZVOUS_SECONDS = 900  # of the agents, once all nodes have connected
JOIN_SECONDS = SCHEDULING_SECONDS + 1800
"""Seconds that nodes wait for each other: as long as for the scheduler, and for a large image."""
JOIN_POLL_SECONDS, SAY_SECONDS = 1.0, 60.0


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
    if "RANK" in os.environ:  # a worker, of our agent or of another launcher
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
    with tempfile.TemporaryDirectory(prefix="lathe-nodes-") as folder:
        _run_nodes(arguments, shape, grace_seconds, Path(folder))


@dataclass(frozen=True)
class Node:
    """This node's rank among `shape.nodes`, and the address where the first one listens."""

    shape: Shape
    rank: int = 0
    address: str = LOOPBACK
    port: int = 0

    def environment(self) -> dict[str, str]:
        """Environment variables, named as torchrun and Kubeflow's Trainer do."""
        return {
            "PET_NNODES": str(self.shape.nodes),
            "PET_NPROC_PER_NODE": str(self.shape.processes_per_node),
            "PET_NODE_RANK": str(self.rank),
            "PET_MASTER_ADDR": self.address,
            "PET_MASTER_PORT": str(self.port),
        }


def this_node() -> Node | None:
    """The node described by the environment; None outside a multi-node job."""
    if "PET_NNODES" not in os.environ:
        return None
    shape = Shape(int(os.environ["PET_NNODES"]), int(os.environ["PET_NPROC_PER_NODE"]))
    address, port = os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"])
    return Node(shape, int(os.environ["PET_NODE_RANK"]), address, port)


def run_node(arguments: Sequence[str], node: Node, grace_seconds: int) -> None:
    """Run this Python with `arguments` in every process of the node, and wait for all.

    Raises:
        WorkerFailed, Preempted, SystemExit: see `launch`.
    """
    alone = node.shape.nodes == 1
    # Kept until the workers have ended: of the first node it is the server, which torch shares.
    store = None if alone else _join(node)  # noqa: F841
    with tempfile.TemporaryDirectory(prefix="lathe-launch-") as logs, ExitStack() as stack:
        stack.callback(signal.signal, UNUSED, signal.getsignal(UNUSED))
        # The error that the agent expects. Its own handler would raise it for every signal, also
        # while workers save their state after the first.
        stack.enter_context(
            first_signal_raises(
                lambda number: SignalException(
                    f"received {signal.Signals(number).name}", signal.Signals(number)
                )
            )
        )
        config = LaunchConfig(
            min_nodes=node.shape.nodes,
            max_nodes=node.shape.nodes,
            nproc_per_node=node.shape.processes_per_node,
            role="rank",  # opens every line of a worker: [rank0]:
            run_id="lathe",
            rdzv_backend="c10d" if alone else "static",
            rdzv_endpoint=f"{node.address}:{node.port}",
            rdzv_configs={} if alone else {"rank": node.rank, "timeout": RENDEZVOUS_SECONDS},
            local_addr=LOOPBACK if node.address == LOOPBACK else None,
            max_restarts=0,  # whoever starts the job decides, and resumes it from saved states
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.NONE, tee=Std.ALL),
            signals_to_handle=UNUSED.name,  # the others are handled already
            shutdown_timeout=grace_seconds,
        )
        # Without this every worker uses all cores and they compete for them.
        on_this_machine = node.shape.processes_per_node * (
            node.shape.nodes if node.address == LOOPBACK else 1
        )
        threads = os.environ.get("OMP_NUM_THREADS") or str(
            max(1, (os.cpu_count() or 1) // on_this_machine)
        )
        worker = [f"OMP_NUM_THREADS={threads}", *tied([sys.executable, "-u", *arguments])]
        try:
            elastic_launch(config, "env")(*worker)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode == Preempted.status:
                raise Preempted(failure.message) from None
            tail = _tail(Path(logs), failure.local_rank)
            raise WorkerFailed(rank, failure.exitcode, tail) from None
        except Exception as error:
            # The handler raises SignalException between any two instructions. Where that is in a
            # `try` of torch's own (its timer of metrics, for one), what arrives here may be a
            # different error, raised while the SignalException was handled.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SignalException):
                cause = cause.__context__
            if cause is None:
                raise
            # The messages of workers that have saved their state: see `report_preemption`.
            files = sorted(Path(logs).glob("*/attempt_0/*/error.json"))
            saved = [json.loads(path.read_text(encoding="utf-8"))["message"] for path in files]
            if len(saved) == node.shape.processes_per_node:
                raise Preempted(saved[0]) from None
            raise SystemExit(128 + cause.sigval) from None


def _tail(logs: Path, local_rank: int) -> str:
    """The last lines of a rank: of its stderr, or of its stdout when that is empty."""
    for stream in ("stderr.log", "stdout.log"):
        for path in logs.glob(f"*/attempt_0/{local_rank}/{stream}"):
            lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
            if lines:
                return "\n".join(lines[-TAIL_LINES:])
    return "(no output)"


def _join(node: Node) -> TCPStore:
    """Wait until all nodes have connected to the first, and return its store.

    torch's own wait says nothing, and has a limit of its own: nodes may start an hour apart.

    Raises:
        StageError: some have not connected in `JOIN_SECONDS`.
    """
    handlers = {number: signal.getsignal(number) for number in TERMINATION}
    for number in TERMINATION:  # connecting is C++, where Python's handlers do not run
        signal.signal(number, signal.SIG_DFL)
    keys = [f"node {rank}" for rank in range(node.shape.nodes)]
    store: TCPStore | None = None
    began = said = time.monotonic()
    while True:
        is_ready = False
        try:
            store = store or TCPStore(
                node.address,
                node.port,
                is_master=node.rank == 0,
                timeout=timedelta(seconds=10),
                wait_for_workers=False,
                multi_tenant=True,
            )
            store.set(keys[node.rank], "")
            is_ready = store.check(keys)
        except DistError:  # the first has not started yet, or was started again
            store = None
        if store and is_ready:
            for number, old in handlers.items():
                signal.signal(number, old)
            return store
        now = time.monotonic()
        is_late = now - began > JOIN_SECONDS
        if is_late or now - said > SAY_SECONDS:
            said, missing = now, [0]
            if store:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            absent = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            what = f"node {absent} of {len(keys)} to join {node.address}:{node.port}"
            if is_late:
                raise StageError(f"waited {now - began:.0f} s for {what}", Code.TIMEOUT)
            log.warning("node %d waits for %s, for %.0f s so far", node.rank, what, now - began)
        time.sleep(JOIN_POLL_SECONDS)


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def _run_nodes(arguments: Sequence[str], shape: Shape, grace_seconds: int, folder: Path) -> None:
    """Run all nodes as processes of this machine, and wait for them; they write how they ended to
    `folder`. See `launch` for the errors."""
    files = [folder / str(rank) for rank in range(shape.nodes)]
    processes: list[subprocess.Popen[bytes]] = []
    failed: int | None = None  # rank of the first node that failed
    with first_signal_raises(_Signalled):
        received: int | None = None
        try:
            # Each in a process group of its own, which can be killed as a whole.
            port = free_port()
            for rank, file in enumerate(files):
                command = [sys.executable, "-u", "-m", "lathe_launch.local"]
                command += [str(file), str(grace_seconds), *arguments]
                environment = os.environ | Node(shape, rank, LOOPBACK, port).environment()
                processes.append(
                    subprocess.Popen(tied(command), env=environment, start_new_session=True)
                )
            while True:
                statuses = [process.poll() for process in processes]
                failed = next((rank for rank, status in enumerate(statuses) if status), None)
                if failed is not None or all(status == 0 for status in statuses):
                    break
                time.sleep(POLL_SECONDS)
        except _Signalled as signalled:
            received = signalled.number
        finally:
            _end(processes, received or signal.SIGTERM, grace_seconds + PATIENCE_SECONDS)
        outcomes: list[dict[str, Any]] = [
            json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()
        ]
        # Preempted only if every node reports it: otherwise the saved state may be incomplete.
        saved: list[str] = [outcome.get("preempted", "") for outcome in outcomes]
        was_preempted = len(saved) == shape.nodes and all(saved)
        if received and not was_preempted:
            raise SystemExit(128 + received)
    if was_preempted and (received or failed is not None):
        raise Preempted(saved[0])
    if failed is None:
        return
    failures = [outcome for outcome in outcomes if "preempted" not in outcome]
    if not failures:
        first, status = failed * shape.processes_per_node, processes[failed].returncode
        raise WorkerFailed(first, status, f"(node {failed} exited before its workers)")

    # Of nodes that ended at nearly the same time, a worker that was killed or raised a UserError is
    # the cause; the others lost their peer and have an ordinary error or SIGABRT.
    def is_effect(failure: dict[str, Any]) -> bool:
        code = failure["exit_code"]
        killed = code < 0 and code != -signal.SIGABRT
        return not killed and code != UserError.status

    raise WorkerFailed(**min(failures, key=is_effect))


def _end(processes: Sequence[subprocess.Popen[bytes]], number: int, seconds: float) -> None:
    """Send a signal to every node, wait, and kill what is left of their process groups."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(number)
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:  # those that have exited, too: their workers may be left
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def main(outcome: Path, grace_seconds: int, arguments: Sequence[str]) -> None:
    """Run the node described by the environment; an exception is written to `outcome` as JSON."""
    node = this_node()
    assert node is not None
    try:
        run_node(arguments, node, grace_seconds)
    except StageError as error:
        if isinstance(error, WorkerFailed):
            said: dict[str, Any] = {
                "rank": error.rank, "exit_code": error.exit_code, "tail": error.tail
            }  # fmt: skip
        elif isinstance(error, Preempted):
            said = {"preempted": str(error)}
        else:
            first = node.rank * node.shape.processes_per_node
            said = {"rank": first, "exit_code": error.status, "tail": str(error)}
        with atomic_file(outcome) as work:
            work.write_text(json.dumps(said), encoding="utf-8")
        raise SystemExit(error.status) from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
