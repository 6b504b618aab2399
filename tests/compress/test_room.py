"""What calibrating, rounding, scoring and cutting a model takes beside its weights, for the choice
of a device with room."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lathe.compress import prune, quantize
from lathe.train.pretrain import pretrain
from lathe.train.workers import Workers, join_workers
from lathe_base.config.recipe import load_recipe
from tests.support.once import once
from tests.support.small_run import SMALL

# Wide, so that weights take far more than the activations of a few texts, as in a model of billions
# of parameters.
WIDE = (*SMALL, "Model.hidden_size=384", "Model.num_layers=6", "Sensitivity.calibration_batches=2")
INT4 = (
    "Compress.Quantization.weight_bits=4",
    "Compress.Quantization.gptq_batches=2",
    "Compress.Quantization.generated_batches=0",
    "Engine.max_steps=0",
)
STATIC = "Compress.Quantization.activation_quantize_type=moving_average_abs_max"
CASES: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "static INT8": (quantize, (STATIC,)),
    "INT8": (quantize, ("Compress.Quantization.activation_quantize_type=auto",)),
    "INT4 by GPTQ": (quantize, INT4),
    "learned rounding": (quantize, (*INT4, "Compress.Quantization.learned_steps=2")),
    "Taylor": (prune, ("Compress.Prune.criterion=taylor", "Compress.Prune.scope=global")),
    "fewer layers": (prune, ("Compress.Prune.layers=1", "Compress.Prune.ratio=0.01")),
}


@pytest.fixture(scope="module")
def wide(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe("tiny", (*WIDE, "Engine.max_steps=0"))
    return once(tmp_path_factory, "wide", lambda path: pretrain(recipe, small_data, path))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_peak_memory_is_within_the_copies_requested(
    case: str, wide: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, overrides = CASES[case]
    sizes: list[int] = []

    def marked(self: Workers, model: nn.Module, copies: float) -> torch.device:
        with record_function("begin"):
            sizes.append(sum(p.nbytes for p in model.parameters()))
        assert copies == module.COPIES
        return self.device

    def made(recipe: Any, data: Path, output: Path, inputs: Any, make: Callable[..., Any], *_: Any):  # type: ignore[no-untyped-def]
        with join_workers(recipe) as group:
            make(group)
        raise InterruptedError

    monkeypatch.setattr(Workers, "device_with_room", marked)
    monkeypatch.setattr(module, "run_training", made)
    recipe = load_recipe("tiny", (*WIDE, *overrides))
    activities = [ProfilerActivity.CPU]
    stage = getattr(module, module.__name__.rpartition(".")[2])
    with (
        profile(activities=activities, profile_memory=True, acc_events=True) as watch,
        pytest.raises(InterruptedError),
    ):
        stage(recipe, wide, small_data, tmp_path / "out")
    held = most = 0
    for event in sorted(watch.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "begin":
            held = most = 0
        elif event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    (weights,) = sizes
    assert 1 + most / weights < module.COPIES


@pytest.mark.parametrize("free, device", [(50e9, "cuda"), (40e9, "cpu")])
def test_a_model_of_7b_is_calibrated_on_a_gpu_of_80_gb(
    free: float,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The GPU's free memory is made up, since tests have none."""
    caplog.set_level(logging.INFO, "lathe")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80e9))
    model = nn.Linear(2**16, 107_000, bias=False, device="meta")  # 28 GB
    with join_workers(load_recipe("tiny", ("Global.device=cpu",))) as group:
        on_gpu = replace(group, device=torch.device("cuda", 0))
        assert on_gpu.device_with_room(model, quantize.COPIES).type == device
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if device == "cuda" else logging.WARNING)
    assert "28.0 GB of weights" in record.getMessage()
