"""Choosing static or dynamic activation scales by the loss that static ones cause."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lathe.compress.activation import with_int8_formats
from lathe.compress.plan import quantizable
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.analyze import analyze
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe.model.quantization import INT8, LinearFormat, WeightFormat
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.massive import MASSIVE, SCALE, gpt2, llama, massive_reader, plant
from tests.support.small_export import save
from tests.support.small_run import SMALL

TOKENS = torch.randint(256, (8, 48), generator=torch.Generator().manual_seed(4))
SCALES = "Compress.Quantization.activation_quantize_type"
QUANTIZE = (*SMALL, "Compress.Quantization.quantize_embedding=True", "Engine.max_steps=0")
STATIC = "moving_average_abs_max"


def chosen(model: GPT, *overrides: str) -> dict[str, Format]:
    recipe = load_recipe("tiny", (*QUANTIZE, *overrides))
    int8: dict[str, Format] = dict.fromkeys(
        quantizable(model.config, recipe.Compress.Quantization), "int8"
    )
    return with_int8_formats(recipe, model, [TOKENS], int8)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_dynamic_scales_are_for_the_linears_where_static_ones_cost_too_much(
    make: Callable[[Path, Tokenizer], GPT],
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    model = plant(make(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    with torch.no_grad():
        before = model(TOKENS)
    formats = chosen(model)
    dynamic = {name for name, form in formats.items() if form == "dynamic_int8"}
    assert massive_reader(model) in dynamic and len(dynamic) <= 2
    assert set(formats.values()) == {"static_int8", "dynamic_int8"}
    first, second = caplog.messages
    assert first.startswith("INT8 with static activation scales") and "dynamic" in first
    words = f"{len(formats) - len(dynamic)} of {len(formats)} INT8 linears have static scales"
    assert second.startswith(words)
    lenient = chosen(
        model, "Gate.max_perplexity_increase=1e4"
    )  # a tenth of this limit is 0.92 nats
    assert set(lenient.values()) == {"static_int8"}
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
def test_required_static_scales_above_the_limit_cause_a_warning(
    override: str,
    hint: str,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    formats = chosen(model, override)
    assert set(formats.values()) == {"static_int8"}
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "nats per token before training" in warning and hint in warning


def test_pact_has_no_bound_for_dynamic_scales() -> None:
    pact = "Compress.Quantization.activation_preprocess_type=PACT"
    with raises(Code.INVALID_VALUE, "dynamic", "PACT"):
        load_recipe("tiny", (pact, f"{SCALES}=dynamic"))


def test_a_trained_toy_keeps_static_scales(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    quantize(load_recipe("tiny", QUANTIZE), small_dense, small_data, tmp_path / "q")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and set(plan.activation_scales) == set(plan.linears)
    assert {form.weight for form in plan.linears.values()} == {INT8}


def test_quantization_follows_what_the_analysis_chose(
    small_data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    dense = save(model, byte_tokenizer, tmp_path / "dense")
    recipe = load_recipe("tiny", (*QUANTIZE, "Sensitivity.eval_batches=1"))
    result = analyze(recipe, dense, small_data, tmp_path / "analysis")
    worst = max(result.linears, key=lambda linear: linear.inputs.token_spread or 0)
    assert worst.name == "h.1.mlp.c_proj" and (worst.inputs.token_spread or 0) > 1000
    assert result.predicted < 0.01 and not result.skip
    assert result.formats[worst.name] == "dynamic_int8"
    assert [*worst.scores] == ["static_int8", "dynamic_int8"]
    page = (tmp_path / "analysis" / "sensitivity.html").read_text()
    assert "largest over median token" in page
    assert json.loads((tmp_path / "analysis" / "sensitivity.json").read_text())["linears"]
    quantize(recipe, dense, small_data, tmp_path / "q", tmp_path / "analysis")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None
    static = {name for name, form in result.formats.items() if form == "static_int8"}
    assert static == set(plan.activation_scales) != set()
    dynamic = LinearFormat(WeightFormat.grouped(64, 8), "dynamic_int8")
    assert {form for name, form in plan.linears.items() if name not in static} == {dynamic}


def test_an_explicit_choice_is_not_measured_again_but_causes_a_warning(
    tmp_path: Path, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    model = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    named: dict[str, Format] = dict.fromkeys(model.config.linear_names(), "static_int8")
    auto, static = (load_recipe("tiny", (*SMALL, f"{SCALES}={x}")) for x in ("auto", STATIC))
    assert with_int8_formats(auto, model, [TOKENS], named) == named and not caplog.records
    assert with_int8_formats(static, model, [TOKENS], named) == named
    assert [record.levelname for record in caplog.records] == ["WARNING"]
