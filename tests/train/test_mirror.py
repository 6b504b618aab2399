"""Training from and to a real object store, on disks that are lost with their machines."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lathe.launch.node import Node
from lathe.launch.shape import Shape
from lathe.storage import exists, fetch, upload
from tests.support.s3 import free_port
from tests.support.small_run import SMALL, run

BATCH = ("Global.global_batch_size=8", "Global.local_batch_size=", "Global.micro_batch_size=2")
SETTINGS = (*SMALL, *BATCH, "Engine.save_load.save_steps=2")


def start(
    s3: str,
    disk: Path,
    *overrides: str,
    node: Node | None = None,
    command: Sequence[str] = (sys.executable, "-m", "lathe", "pretrain"),
) -> subprocess.Popen[str]:
    """A command of Lathe from and to the store, on a machine whose only disk is `disk`."""
    options = [part for o in (*SETTINGS, *overrides) for part in ("-o", o)]
    environment = os.environ | {"XDG_CACHE_HOME": str(disk), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--data", f"{s3}/tokens", "--output", f"{s3}/run", *options],
        env=environment | (node.environment() if node else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == status, said
    return said


def wait_for_steps(s3: str, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not exists(f"{s3}/run.state/steps.json"):
        assert time.monotonic() < deadline
        assert all(p.poll() is None for p in processes), processes[0].communicate()[0]
        time.sleep(0.05)


def assert_is(s3: str, expected: Path, tmp_path: Path) -> None:
    """The store has the finished run, bit for bit, and nothing else of it."""
    found = fetch(f"{s3}/run/", tmp_path / "found")
    one, other = (load_file(path / "model.safetensors") for path in (expected, found))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())
    trace = [len((path / "train.jsonl").read_text().splitlines()) for path in (expected, found)]
    assert trace[0] == trace[1]
    assert not exists(f"{s3}/run.state/")


def train_whole(s3: str, data: Path, output: Path, *overrides: str) -> Path:
    """The run that nothing happens to, and its data in the store."""
    upload(data, f"{s3}/tokens")
    run("pretrain", data, output, overrides=(*SETTINGS, *overrides))
    return output


@pytest.mark.slow
def test_a_machine_that_is_lost(s3: str, small_data: Path, tmp_path: Path) -> None:
    dropout = "Model.hidden_dropout_prob=0.1"
    whole = train_whole(s3, small_data, tmp_path / "whole", dropout)
    process = start(s3, tmp_path / "first", dropout)
    wait_for_steps(s3, process)
    process.send_signal(signal.SIGKILL)
    ended(process, -signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    said = ended(start(s3, tmp_path / "second", dropout))
    assert "resuming at step" in said
    assert_is(s3, whole, tmp_path)
    assert "is finished: nothing to do" in ended(start(s3, tmp_path / "third", dropout))


@pytest.mark.long
def test_nodes_with_disks_of_their_own(s3: str, small_data: Path, tmp_path: Path) -> None:
    """Two nodes of two processes, as a TrainJob's pods: one is lost, then both start anew."""
    layout = ("Distributed.dp_degree=2", "Distributed.sharding.sharding_degree=2")
    whole = train_whole(s3, small_data, tmp_path / "whole")

    def start_nodes(attempt: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        nodes = [Node(Shape(2, 2), rank, "127.0.0.1", port) for rank in (0, 1)]
        return [start(s3, tmp_path / f"{attempt}{n.rank}", *layout, node=n) for n in nodes]

    nodes = start_nodes("first")
    wait_for_steps(s3, *nodes)
    for node in nodes:
        node.send_signal(signal.SIGKILL)
        ended(node, -signal.SIGKILL)
    said = [ended(node) for node in start_nodes("second")]
    assert "resuming at step" in said[0]
    found = fetch(f"{s3}/run/", tmp_path / "found")
    one, other = (load_file(path / "model.safetensors") for path in (whole, found))
    assert all(tensor.allclose(other[name], atol=1e-4) for name, tensor in one.items())
    assert not exists(f"{s3}/run.state/")


@pytest.mark.slow
def test_nodes_that_share_no_disk_need_an_address(small_data: Path, tmp_path: Path) -> None:
    port = free_port()
    nodes = [Node(Shape(2, 1), rank, "127.0.0.1", port) for rank in (0, 1)]
    options = [part for o in (*SETTINGS, "Distributed.dp_degree=2") for part in ("-o", o)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "lathe", "pretrain", "--data", str(small_data)),
                *("--output", str(tmp_path / f"disk{node.rank}"), *options),
            ],
            env=os.environ | node.environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in nodes
    ]
    assert "the nodes do not share this folder" in ended(processes[0], 2)
    processes[1].kill()
    processes[1].communicate()
