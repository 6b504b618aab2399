"""No checkpoint is written whose loss is not finite, with or without training."""

import math
from pathlib import Path

import pytest
import torch

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.train.result import TrainResult
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL

LINEAR = "h.1.mlp.c_proj"


def with_weight(dense: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of a checkpoint with another value in one entry of a parameter."""
    found = load_checkpoint(dense)
    with torch.no_grad():
        found.model.get_parameter(name).view(-1)[0] = value
    save_checkpoint(folder, found.model, found.tokenizer, "pretrain", Recipe())
    return folder


def quantized(source: Path, data: Path, output: Path, *overrides: str) -> TrainResult:
    recipe = load_recipe(
        "tiny", (*SMALL, "Engine.max_steps=0", "Compress.Quantization.weight_bits=4", *overrides)
    )
    return quantize(recipe, source, data, output)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_int4_groups_whose_scale_exceeds_float16_take_the_largest_scale(
    rounding: str,
    small_dense: Path,
    small_data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scale was infinity, and the weights of its group NaN."""
    source = with_weight(small_dense, tmp_path / "dense", f"{LINEAR}.weight", 1e6)
    result = quantized(
        source, small_data, tmp_path / "q", f"Compress.Quantization.rounding={rounding}"
    )
    assert math.isfinite(result.eval_loss)
    assert f"{LINEAR}: the scale of a group exceeds float16" in caplog.text


def test_a_model_without_a_finite_loss_is_not_quantized(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    source = with_weight(small_dense, tmp_path / "dense", "ln_f.weight", 3e38)
    with raises(Code.NOT_FINITE, f"{source}: its loss"):
        quantized(source, small_data, tmp_path / "q")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("steps", [0, 1])
def test_no_training_stage_writes_a_checkpoint_without_a_finite_loss(
    steps: int,
    small_dense: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lathe.train.trainer.Trainer.validation_loss", lambda _: math.nan)
    recipe = load_recipe("tiny", (*SMALL, f"Engine.max_steps={steps}", "Compress.Prune.ratio=0.5"))
    with raises(Code.NOT_FINITE, f"step {steps}"):
        prune(recipe, small_dense, small_data, tmp_path / "p")
    assert not (tmp_path / "p" / "lathe.json").exists()
