"""The Paddle engine with a real object store, on machines that are lost."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lathe.backends.paddle_process import find_python
from lathe_base.config.recipe import load_recipe
from lathe_base.ports import free_port
from lathe_base.storage import exists, fetch, upload
from lathe_launch.local import Node
from lathe_launch.shape import Shape
from tests.support.mirrored_run import SETTINGS, start, wait_for_exit, wait_for_steps
from tests.support.stages import prune

ENGINE = ("Compress.engine=paddle", "Global.device=cpu")


@pytest.fixture(scope="module")
def whole(
    paddle_python: Path,
    small_data: Path,
    small_dense: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The uninterrupted run, for comparison."""
    output = tmp_path_factory.mktemp("paddle-store") / "whole"
    recipe = load_recipe("tiny-prune-paddle", [*SETTINGS, *ENGINE])
    prune(recipe, small_dense, small_data, output)
    return output


@pytest.fixture
def store(s3: str, small_data: Path, small_dense: Path) -> str:
    upload(small_data, f"{s3}/tokens")
    upload(small_dense, f"{s3}/dense")
    return s3


def machine(
    store: str, disk: Path, *overrides: str, node: Node | None = None
) -> subprocess.Popen[str]:
    """Start training on one machine, or a node as a pod of the runtime lathe-paddle."""
    python, module = (find_python(), "lathe_paddle") if node else (sys.executable, "lathe")
    command = (str(python), "-m", module, "prune", f"{store}/dense", "-r", "tiny-prune-paddle")
    return start(store, disk, *ENGINE, *overrides, node=node, command=command)


def weights(store: str, tmp_path: Path) -> dict[str, np.ndarray]:
    return load_file(fetch(f"{store}/run/", tmp_path / "found") / "model.safetensors")


@pytest.mark.slow
def test_a_machine_that_is_lost(store: str, whole: Path, tmp_path: Path) -> None:
    process = machine(store, tmp_path / "first")
    wait_for_steps(store, process)
    process.send_signal(signal.SIGKILL)
    wait_for_exit(process, -signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    assert "resuming at step" in wait_for_exit(machine(store, tmp_path / "second"))
    expected = load_file(whole / "model.safetensors")
    assert all(np.array_equal(a, expected[n]) for n, a in weights(store, tmp_path).items())
    assert not exists(f"{store}/run.state/")


@pytest.mark.long
def test_nodes_with_disks_of_their_own(store: str, whole: Path, tmp_path: Path) -> None:
    """Two nodes like a TrainJob's pods, with sharded optimizer states; both are lost once."""

    def start_nodes(attempt: str) -> list[subprocess.Popen[str]]:
        port, sharded = free_port(), "Distributed.sharding.sharding_degree=2"
        nodes = [Node(Shape(2, 1), rank, "127.0.0.1", port) for rank in (0, 1)]
        return [machine(store, tmp_path / f"{attempt}{n.rank}", sharded, node=n) for n in nodes]

    nodes = start_nodes("first")
    wait_for_steps(store, *nodes)
    for node in nodes:
        node.send_signal(signal.SIGKILL)
        wait_for_exit(node, -signal.SIGKILL)
    said = [wait_for_exit(node) for node in start_nodes("second")]
    assert "resuming at step" in said[0]
    expected = load_file(whole / "model.safetensors")
    for name, array in weights(store, tmp_path).items():
        assert np.allclose(array, expected[name], atol=1e-4), name
