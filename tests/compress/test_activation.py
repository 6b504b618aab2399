"""Static or dynamic scales of activations, chosen by what static ones cost the model."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lathe.compress.activation import with_activation_scales
from lathe.compress.plan import all_int8
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.analyze import analyze
from lathe.config.recipe import load_recipe
from lathe.errors import UserError
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe.model.quantization import INT8, LinearFormat, WeightFormat
from tests.support.massive import MASSIVE, SCALE, gpt2, llama, plant
from tests.support.small_export import save
from tests.support.small_run import SMALL

TOKENS = torch.randint(256, (8, 48), generator=torch.Generator().manual_seed(4))
SCALES = "Compress.Quantization.activation_quantize_type"
QUANTIZE = (*SMALL, "Compress.Quantization.quantize_embedding=True", "Engine.max_steps=0")
STATIC = "moving_average_abs_max"


def chosen(model: GPT, *overrides: str) -> str:
    recipe = load_recipe("tiny", (*QUANTIZE, *overrides))
    int8 = all_int8(model.config, recipe.Compress.Quantization)
    return with_activation_scales(recipe, model, [TOKENS], int8).activation_quantize_type


@pytest.mark.parametrize("make", [gpt2, llama])
def test_dynamic_scales_are_for_models_that_static_ones_cost_too_much(
    make: Callable[[Path, Tokenizer], GPT],
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    model = plant(make(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    with torch.no_grad():
        before = model(TOKENS)
    assert chosen(model) == "dynamic"
    (line,) = caplog.messages
    assert line.startswith("INT8 with static activation scales costs") and "dynamic" in line
    assert chosen(model, "Gate.max_perplexity_increase=1e4") == STATIC  # a tenth is 0.92 nats
    with torch.no_grad():
        assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        (f"{SCALES}={STATIC}", "activation_quantize_type=auto"),
        ("Compress.Quantization.activation_preprocess_type=PACT", "PACT"),
        ("Distributed.mp_degree=2", "mp_degree 2"),
    ],
)
def test_static_scales_that_must_be_and_cost_too_much_are_warned_of(
    override: str,
    hint: str,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    assert chosen(model, override) == STATIC
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "nats a token before training" in warning and hint in warning


def test_pact_has_no_bound_for_dynamic_scales() -> None:
    pact = "Compress.Quantization.activation_preprocess_type=PACT"
    with pytest.raises(UserError, match="dynamic gives every token"):
        load_recipe("tiny", (pact, f"{SCALES}=dynamic"))


def test_a_trained_toy_keeps_static_scales(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    quantize(load_recipe("tiny", QUANTIZE), small_dense, small_data, tmp_path / "q")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and set(plan.activation_scales) == set(plan.linears)
    assert {form.weight for form in plan.linears.values()} == {INT8}


def test_analysis_and_quantization_choose_the_same(
    small_data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    dense = save(model, byte_tokenizer, tmp_path / "dense")
    recipe = load_recipe("tiny", (*QUANTIZE, "Sensitivity.eval_batches=1"))
    result = analyze(recipe, dense, small_data, tmp_path / "analysis")
    worst = max(result.linears, key=lambda linear: linear.inputs.token_spread or 0)
    assert worst.name == "h.1.mlp.c_proj" and (worst.inputs.token_spread or 0) > 1000
    assert result.predicted < 0.01 and not result.skip
    page = (tmp_path / "analysis" / "sensitivity.html").read_text()
    assert "largest over median token" in page
    assert json.loads((tmp_path / "analysis" / "sensitivity.json").read_text())["linears"]
    quantize(recipe, dense, small_data, tmp_path / "q", tmp_path / "analysis")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and not plan.activation_scales
    dynamic = LinearFormat(WeightFormat.grouped(64, 8), "dynamic_int8")
    assert set(plan.linears.values()) == {dynamic}
