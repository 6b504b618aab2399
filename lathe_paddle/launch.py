"""Run a verb of this engine in several processes with `paddle.distributed.launch`.

On one machine the processes connect over the loopback interface. On a cluster, Kubeflow Trainer's
torch policy started this process, and its `PET_*` variables say how many machines there are.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paddle

from lathe.backends.paddle_process import LOGS_VARIABLE, OUTCOME, rebuild_error
from lathe_base.config.settings import DistributedSettings
from lathe_base.errors import Code, Preempted, StageError
from lathe_launch.parent import die_with_parent

SCRIPT = Path(__file__).with_name("__main__.py")
TAIL_LINES = 20


@dataclass(frozen=True)
class LaunchShape:
    """Number of machines, processes per machine, and for several machines the master's address."""

    nodes: int = 1
    processes_per_node: int = 1
    node_rank: int = 0
    master: str | None = None

    @property
    def processes(self) -> int:
        """Total number of processes."""
        return self.nodes * self.processes_per_node


def shape(settings: DistributedSettings) -> LaunchShape:
    """The processes that the degrees ask for on this machine, or those of `PET_*`; with
    `dp_degree: auto` they fill the GPUs."""
    environment = os.environ
    if "PET_NNODES" in environment:
        return LaunchShape(
            nodes=int(environment["PET_NNODES"]),
            processes_per_node=int(environment.get("PET_NPROC_PER_NODE", 1)),
            node_rank=int(environment.get("PET_NODE_RANK", 0)),
            master=f"{environment['PET_MASTER_ADDR']}:{environment['PET_MASTER_PORT']}",
        )
    inner = settings.mp_degree * settings.sharding.sharding_degree
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    dp = max(1, gpus // inner) if settings.dp_degree == "auto" else settings.dp_degree
    return LaunchShape(processes_per_node=dp * inner)


def launch(command: Sequence[str], shape: LaunchShape) -> None:
    """Run `python -m lathe_paddle <command>` in every process of `shape` and wait for all.

    Raises:
        Preempted: SIGTERM arrived, and every worker saved its state.
        UserError, StageError: what a worker raised, or its last lines if it failed otherwise.
    """
    root = str(SCRIPT.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="lathe-paddle-") as logs:
        # Python puts a script's folder first in its path, where `gpt.py` and others would shadow
        # modules of that name; PYTHONSAFEPATH prevents that.
        environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, LOGS_VARIABLE: logs}
        process = subprocess.Popen(
            arguments(command, shape, logs),
            env=os.environ | environment,
            preexec_fn=die_with_parent,
        )
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
        if status == 0:
            return
        raised = [
            json.loads(path.read_text(encoding="utf-8")) for path in Path(logs).glob(f"{OUTCOME}*")
        ]
        # If one fails, the others are asked to save and end: its error counts.
        if raised:
            raise rebuild_error(
                **min(raised, key=lambda outcome: outcome["status"] == Preempted.status)
            )
        raise StageError(f"a worker failed; its last lines:\n{_tail(Path(logs))}", Code.FAILED)


def arguments(command: Sequence[str], shape: LaunchShape, logs: str) -> list[str]:
    """The command line of `paddle.distributed.launch`."""
    meeting = ["--master", shape.master, "--rank", str(shape.node_rank)] if shape.master else []
    return [
        *(sys.executable, "-m", "paddle.distributed.launch", "--log_dir", logs, *meeting),
        *("--nnodes", str(shape.nodes), "--nproc_per_node", str(shape.processes_per_node)),
        *(str(SCRIPT), *command),
    ]


def _tail(logs: Path) -> str:
    """The last log lines of the worker that reports an error, or of the first worker."""
    texts = [
        path.read_text(errors="replace", encoding="utf-8")
        for path in sorted(logs.glob("workerlog.*"))
    ]
    text = next((t for t in texts if "error: " in t), texts[0] if texts else "")
    return "\n".join(text.splitlines()[-TAIL_LINES:])
