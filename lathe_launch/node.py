"""One node of a distributed job: torch's elastic agent (which torchrun wraps) and its processes.

`python -m lathe_launch.node OUTCOME GRACE ARGUMENT...` is how `lathe_launch.local` starts one.
"""

import json
import logging
import os
import signal
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

from lathe_base.errors import Code, Preempted, StageError
from lathe_base.ports import LOOPBACK
from lathe_base.storage import atomic_file
from lathe_launch.parent import tied
from lathe_launch.shape import SCHEDULING_SECONDS, Shape, WorkerFailed
from lathe_launch.signals import TERMINATION, first_signal_raises

log = logging.getLogger("lathe")

TAIL_LINES = 20
UNUSED = signal.SIGUSR2
"""A signal for the agent, which insists on handling one."""
JOIN_SECONDS = SCHEDULING_SECONDS + 1800
"""Seconds that nodes wait for each other: as long as for the scheduler, and for a large image."""
POLL_SECONDS, SAY_SECONDS = 1.0, 60.0


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
        WorkerFailed, Preempted, SystemExit: see `lathe_launch.local.launch`.
    """
    alone = node.shape.nodes == 1
    # Kept until the workers have ended: of the first node it is the server, which torch shares.
    store = None if alone else _join(node)  # noqa: F841
    with tempfile.TemporaryDirectory(prefix="lathe-launch-") as logs, ExitStack() as stack:
        stack.callback(signal.signal, UNUSED, signal.getsignal(UNUSED))
        stack.enter_context(first_signal_raises(_agent_error))
        config = LaunchConfig(
            min_nodes=node.shape.nodes,
            max_nodes=node.shape.nodes,
            nproc_per_node=node.shape.processes_per_node,
            role="rank",  # opens every line of a worker: [rank0]:
            run_id="lathe",
            rdzv_backend="c10d" if alone else "static",
            rdzv_endpoint=f"{node.address}:{node.port}",
            rdzv_configs={} if alone else {"rank": node.rank, "timeout": 900},
            local_addr=LOOPBACK if node.address == LOOPBACK else None,
            max_restarts=0,
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
            signalled = _signal_behind(error)
            if signalled is None:
                raise
            # The messages of workers that have saved their state: see `report_preemption`.
            files = sorted(Path(logs).glob("*/attempt_0/*/error.json"))
            saved = [json.loads(path.read_text(encoding="utf-8"))["message"] for path in files]
            if len(saved) == node.shape.processes_per_node:
                raise Preempted(saved[0]) from None
            raise SystemExit(128 + signalled) from None


def _signal_behind(error: BaseException | None) -> int | None:
    """The number of the signal that caused `error`, or None.

    The agent's handler raises SignalException between any two instructions. Where that is in a
    `try` of torch's own (its timer of metrics, for one), what arrives here may be a different
    error, raised while the SignalException was handled.
    """
    while error is not None:
        if isinstance(error, SignalException):
            return error.sigval
        error = error.__context__
    return None


def _tail(logs: Path, local_rank: int) -> str:
    """The last lines of a rank: of its stderr, or of its stdout when that is empty."""
    for stream in ("stderr.log", "stdout.log"):
        for path in logs.glob(f"*/attempt_0/{local_rank}/{stream}"):
            lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
            if lines:
                return "\n".join(lines[-TAIL_LINES:])
    return "(no output)"


def _agent_error(number: int) -> SignalException:
    """The error that the agent expects. Its own handler would raise it for every signal, also while
    workers save their state after the first."""
    return SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))


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
        time.sleep(POLL_SECONDS)


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
