"""Run a worker command on local processes with torch's elastic agent (what torchrun is)."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lathe.errors import Preempted, StageError, UserError
from lathe.settings import DistributedSettings

TAIL_LINES = 20
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class Shape:
    """How many processes, and where: `nodes` machines with `processes_per_node` each."""

    nodes: int = 1
    processes_per_node: int = 1

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def local_shape(settings: DistributedSettings) -> Shape:
    """The processes that these degrees ask of this machine; `auto` is one a GPU, or one."""
    inner = settings.mp_degree * settings.pp_degree * settings.sharding.sharding_degree
    automatic = max(1, torch.cuda.device_count() // inner)
    dp = automatic if settings.dp_degree == "auto" else settings.dp_degree
    return Shape(processes_per_node=dp * inner)


def start_workers(command: Sequence[str], settings: DistributedSettings) -> bool:
    """`launch` the command where the settings ask for several processes.

    Returns:
        False where one is enough, or this process is itself a worker: do the work here.
    """
    shape = local_shape(settings)
    if shape.processes == 1 or "RANK" in os.environ:
        return False
    launch(command, shape, settings.grace_seconds)
    return True


class WorkerFailed(StageError):
    """A worker ended badly: its rank, exit code (negative: the signal) and last lines."""

    def __init__(self, rank: int, exit_code: int, tail: str) -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}; its last lines:\n{tail}")
        self.rank, self.exit_code, self.tail = rank, exit_code, tail
        if exit_code == UserError.status:
            self.status = exit_code


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
    with tempfile.TemporaryDirectory(prefix="lathe-launch-") as logs, _signals_restored():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=shape.processes,
            role="rank",  # opens every line of a worker: [rank0]:
            run_id="local",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.NONE, tee=Std.ALL),
            signals_to_handle=",".join(HANDLED),
            shutdown_timeout=grace_seconds,
        )
        # Without this every worker takes all cores and they fight for them.
        threads = os.environ.get("OMP_NUM_THREADS") or str(
            max(1, (os.cpu_count() or 1) // shape.processes)
        )
        worker = [f"OMP_NUM_THREADS={threads}", sys.executable, "-u", *arguments]
        try:
            elastic_launch(config, "env")(*worker)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            tail = _tail(Path(logs), failure.local_rank)
            if failure.exitcode == Preempted.status:
                raise Preempted(_said(tail)) from None
            raise WorkerFailed(rank, failure.exitcode, tail) from None
        except SignalException as error:
            tails = [_tail(Path(logs), rank) for rank in range(shape.processes)]
            if all(Preempted.kind in tail for tail in tails):
                raise Preempted(_said(tails[0])) from None
            raise SystemExit(128 + error.sigval) from None


def _said(tail: str) -> str:
    """What a preempted worker's last words are, without their kind."""
    return tail.rpartition(f"{Preempted.kind}: ")[2].splitlines()[0]


def _tail(logs: Path, local_rank: int) -> str:
    """The last lines of a rank: of its stderr, or of its stdout when that is empty."""
    for stream in ("stderr.log", "stdout.log"):
        for path in logs.glob(f"*/attempt_0/{local_rank}/{stream}"):
            lines = path.read_text(errors="replace").splitlines()
            if lines:
                return "\n".join(lines[-TAIL_LINES:])
    return "(it wrote nothing)"


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent replaces the handlers of this process and leaves its own behind."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in HANDLED}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
