"""Training with a real object store, on machines that are lost with their disks."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lathe_base.ports import free_port
from lathe_base.storage import exists, fetch
from lathe_launch.local import Node
from lathe_launch.shape import Shape
from tests.support import warm
from tests.support.mirrored_run import (
    SETTINGS,
    start,
    train_uninterrupted,
    wait_for_exit,
    wait_for_steps,
)


def assert_is(s3: str, expected: Path, tmp_path: Path) -> None:
    """Check that the store has the finished run, bit for bit, and nothing else."""
    found = fetch(f"{s3}/run/", tmp_path / "found")
    one, other = (load_file(path / "model.safetensors") for path in (expected, found))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())
    trace = [len((path / "train.jsonl").read_text().splitlines()) for path in (expected, found)]
    assert trace[0] == trace[1]
    assert not exists(f"{s3}/run.state/")


@pytest.mark.slow
def test_a_machine_that_is_lost(s3: str, small_data: Path, tmp_path: Path) -> None:
    dropout = "Model.hidden_dropout_prob=0.1"
    whole = train_uninterrupted(s3, small_data, tmp_path / "whole", dropout)
    process = start(s3, tmp_path / "first", dropout)
    wait_for_steps(s3, process)
    process.send_signal(signal.SIGKILL)
    wait_for_exit(process, -signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    said = wait_for_exit(start(s3, tmp_path / "second", dropout))
    assert "resuming at step" in said
    assert_is(s3, whole, tmp_path)
    assert "is finished: nothing to do" in wait_for_exit(start(s3, tmp_path / "third", dropout))


@pytest.mark.long
def test_nodes_with_disks_of_their_own(s3: str, small_data: Path, tmp_path: Path) -> None:
    """Two nodes with two processes each, like a TrainJob's pods: one is lost, then both restart."""
    layout = ("Distributed.dp_degree=2", "Distributed.sharding.sharding_degree=2")
    whole = train_uninterrupted(s3, small_data, tmp_path / "whole")

    def start_nodes(attempt: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        nodes = [Node(Shape(2, 2), rank, "127.0.0.1", port) for rank in (0, 1)]
        return [start(s3, tmp_path / f"{attempt}{n.rank}", *layout, node=n) for n in nodes]

    nodes = start_nodes("first")
    wait_for_steps(s3, *nodes)
    for node in nodes:
        node.send_signal(signal.SIGKILL)
        wait_for_exit(node, -signal.SIGKILL)
    said = [wait_for_exit(node) for node in start_nodes("second")]
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
                *(*warm.python(), "-m", "lathe", "pretrain", "--data", str(small_data)),
                *("--output", str(tmp_path / f"disk{node.rank}"), *options),
            ],
            env=os.environ | node.environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in nodes
    ]
    assert "the nodes do not share this folder" in wait_for_exit(processes[0], 2)
    processes[1].kill()
    processes[1].communicate()
