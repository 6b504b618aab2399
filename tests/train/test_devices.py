"""Requesting a GPU that does not exist, and what a training sets for its own length."""

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from lathe.model.block import attention_kernels
from lathe.model.gpt import GPT
from lathe.train.loop import garbage_waits
from lathe.train.parallel import explain_limit
from lathe.train.run import CACHE, kept_kernels
from lathe.train.workers import choose_device, deterministic, tensor_float32
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.apart import run_apart
from tests.support.command_line import lathe
from tests.support.errors import raises

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
    with raises(Code.NO_GPU, asked, seen) as said:
        choose_device(load_recipe("tiny", [override]))
    assert ("FLAVOUR=cuda" in str(said.value)) == (cuda is None)


def test_fewer_gpus_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(Code.NO_GPU, "3 or more processes", "2 GPUs"):
        choose_device(load_recipe("tiny"))


@pytest.mark.parametrize("given", ["Global.device=cpu", "Launch.gpus_per_node=0"])
def test_cpus_on_request(given: str) -> None:
    assert choose_device(load_recipe("tiny", [given])).type == "cpu"


def test_the_command_refuses(small_data: Path, tmp_path: Path) -> None:
    options = ("-o", "Launch.gpus_per_node=1", "-o", "Distributed.dp_degree=1")
    done = lathe("pretrain", "--data", str(small_data), *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "error[no-gpu]: Launch.gpus_per_node is 1, but torch" in done.stderr
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


def test_tf32_for_the_length_of_a_training_on_a_gpu() -> None:
    before = torch.get_float32_matmul_precision()
    for device, precision in (("cpu", before), ("cuda", "high")):
        with tensor_float32(torch.device(device)):
            assert torch.get_float32_matmul_precision() == precision
        assert torch.get_float32_matmul_precision() == before


def test_memory_is_allocated_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    chosen = {"mine": "max_split_size_mb:64", "": "expandable_segments:True"}
    for given, expected in chosen.items():
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", expected if given else "")
        if not given:
            monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
        choose_device(load_recipe("tiny"))
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_python_collects_no_garbage_during_a_training() -> None:
    assert gc.isenabled()
    with garbage_waits():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_compiled_kernels_are_kept_with_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    with kept_kernels(tmp_path):
        assert os.environ[CACHE] == str(tmp_path / "state" / "kernels")
    assert CACHE not in os.environ
    monkeypatch.setenv(CACHE, "/elsewhere")
    with kept_kernels(tmp_path):
        assert os.environ[CACHE] == "/elsewhere"


def test_the_chosen_kernel_of_attention_is_known(small_gpt: GPT) -> None:
    assert attention_kernels(small_gpt, torch.float32, 16) == ["flash attention"]


def test_what_is_not_compiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def compile_too_often() -> None:
        logging.getLogger("torch._dynamo.convert_frame").addFilter(explain_limit)
        double = torch.compile(lambda x, n: x * n.bit_length(), backend="eager", dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=1):
            for n in (1, 2, 4):
                double(torch.ones(n), n)
        assert "may; for further ones it runs uncompiled" in caplog.text
        assert "hit config" not in caplog.text

    run_apart(compile_too_often)
