"""Requesting a GPU that does not exist."""

from pathlib import Path

import pytest
import torch

from lathe.train.workers import choose_device, deterministic
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import UserError
from tests.support.command_line import lathe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("override", "asked"),
    [
        ("Launch.gpus_per_node=2", "Launch.gpus_per_node is 2"),
        ("Global.device=gpu", "Global.device is gpu"),
    ],
)
@pytest.mark.parametrize(
    ("cuda", "seen"), [(None, "a CPU-only build"), ("12.8", "finds none on this machine")]
)
def test_nothing_computes_on_the_cpu_instead(
    monkeypatch: pytest.MonkeyPatch, override: str, asked: str, cuda: str | None, seen: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=f"{asked}, but torch .* {seen}") as said:
        choose_device(load_recipe("tiny", [override]))
    assert ("FLAVOUR=cuda" in str(said.value)) == (cuda is None)


def test_fewer_gpus_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"starts 3 or more processes .* torch finds 2 GPUs"):
        choose_device(load_recipe("tiny"))


@pytest.mark.parametrize("given", ["Global.device=cpu", "Launch.gpus_per_node=0"])
def test_cpus_when_they_are_asked_for(given: str) -> None:
    assert choose_device(load_recipe("tiny", [given])).type == "cpu"


def test_the_command_refuses(small_data: Path, tmp_path: Path) -> None:
    options = ("-o", "Launch.gpus_per_node=1", "-o", "Distributed.dp_degree=1")
    done = lathe("pretrain", "--data", str(small_data), *options, cwd=tmp_path)
    assert done.returncode == 2 and "Launch.gpus_per_node is 1, but torch" in done.stderr
    assert not any(tmp_path.iterdir())


def test_deterministic_kernels_for_the_length_of_a_training() -> None:
    def modes() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()

    before = modes()
    with deterministic(False):
        assert modes() == before
    with deterministic(True):
        assert modes() == (True, False)
    assert modes() == before
