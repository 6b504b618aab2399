"""Training runs that read from and write to a real object store."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from lathe_base.storage import exists, upload
from lathe_launch.local import Node
from tests.support import warm
from tests.support.small_run import SMALL, run

BATCH = ("Global.global_batch_size=8", "Global.local_batch_size=", "Global.micro_batch_size=2")
SETTINGS = (*SMALL, *BATCH, "Engine.save_load.save_steps=2")


def start(
    s3: str,
    disk: Path,
    *overrides: str,
    node: Node | None = None,
    command: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a command of Lathe on data in the store, as on a new machine with the disk `disk`."""
    options = [part for o in (*SETTINGS, *overrides) for part in ("-o", o)]
    environment = os.environ | {"XDG_CACHE_HOME": str(disk), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [
            *(command or [*warm.python(), "-m", "lathe", "pretrain"]),
            "--data",
            f"{s3}/tokens",
            "--output",
            f"{s3}/run",
            *options,
        ],
        env=environment | (node.environment() if node else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_exit(process: subprocess.Popen[str], status: int = 0) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == status, said
    return said


def wait_for_steps(s3: str, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not exists(f"{s3}/run.state/steps.json"):
        assert time.monotonic() < deadline
        assert all(p.poll() is None for p in processes), processes[0].communicate()[0]
        time.sleep(0.05)


def train_uninterrupted(s3: str, data: Path, output: Path, *overrides: str) -> Path:
    """Upload the data to the store and train without interruption, for comparison."""
    upload(data, f"{s3}/tokens")
    run("pretrain", data, output, overrides=(*SETTINGS, *overrides))
    return output
