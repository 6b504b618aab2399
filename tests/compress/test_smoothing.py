"""Smoothing preserves the function and reduces quantization errors."""

import copy
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from lathe.compress import activation, smoothing
from lathe.compress.activation import smoothing_factors
from lathe.compress.plan import make_plan, quantizable
from lathe.compress.smoothing import find_factors, fold
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import QuantizationSettings
from lathe_base.config.settings.types import Format
from tests.support import families
from tests.support.massive import MASSIVE, SCALE, gpt2, llama, plant
from tests.support.small_export import PRUNED, make_model
from tests.support.small_run import SMALL
from tests.support.tables import quick_only

TOKENS = torch.randint(256, (8, 48), generator=torch.Generator().manual_seed(4))


def load_family(family: str, folder: Path, tokenizer: Tokenizer) -> GPT:
    if family == "gpt2":
        return make_model(PRUNED)  # widths differ between layers
    hf = families.make(family, head_dim=16)
    return load_checkpoint(families.save(hf, folder / "hf", tokenizer)).model.eval()


def divergence(reference: GPT, model: GPT) -> float:
    with torch.no_grad():
        p, q = (x(TOKENS).double().log_softmax(-1) for x in (reference, model))
    return float(F.kl_div(q, p, reduction="batchmean", log_target=True)) / TOKENS.shape[1]


@pytest.mark.parametrize(
    "family", quick_only(["gpt2", "llama", "qwen2", "qwen3"], ["gpt2", "qwen3"])
)
def test_the_function_stays(family: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = load_family(family, tmp_path, byte_tokenizer)
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in model.named_parameters():  # uneven channels for smoothing to even out
            if "norm" in name or ".ln_" in name:
                parameter.mul_(torch.logspace(-1, 1, len(parameter)))
        before = model(TOKENS)
    plan = make_plan(model.config, QuantizationSettings(weight_bits=4))
    factors = find_factors(model, [TOKENS], plan.linears, False)
    kinds = {name.rpartition(".")[2] for name in factors}
    assert len(kinds) >= (2 if family == "gpt2" else 3)
    weights = copy.deepcopy(model.state_dict())
    fold(model, factors)
    changed = [name for name, value in model.state_dict().items() if not value.equal(weights[name])]
    assert len(changed) >= 2 * len(kinds)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), before, rtol=1e-3, atol=1e-3)


INT4 = {"weight_bits": 4}
DYNAMIC = {"activation_quantize_type": "dynamic"}
STATIC = {"activation_quantize_type": "moving_average_abs_max"}


@pytest.mark.parametrize(
    ("make", "settings"),
    quick_only(
        product((gpt2, llama), (INT4, DYNAMIC, STATIC)),
        [(llama, INT4), (llama, DYNAMIC), (gpt2, STATIC)],
    ),
)
def test_smoothing_reduces_the_rounding_error(
    make: Callable[[Path, Tokenizer], GPT],
    settings: dict[str, object],
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
) -> None:
    model = make(tmp_path, byte_tokenizer)
    with torch.no_grad():
        for block in model.blocks:  # channels as uneven as a pretrained model's
            for norm, *_ in block.halves:
                norm.weight.mul_(
                    torch.logspace(-1.5, 1.5, len(norm.weight))[torch.randperm(len(norm.weight))]
                )
    plan = make_plan(model.config, QuantizationSettings(**settings))  # type: ignore[arg-type]
    smoothed = copy.deepcopy(model)
    fold(smoothed, find_factors(model, [TOKENS], plan.linears, False))
    costs = []
    for one in (model, smoothed):
        quantized = copy.deepcopy(one)
        fake_quant.insert(quantized, plan)
        fake_quant.calibrate(quantized, [TOKENS])
        costs.append(divergence(model, quantized))
    assert costs[1] < costs[0]


def test_it_is_done_where_it_is_due(
    tmp_path: Path, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")

    def places(model: GPT, *overrides: str) -> int:
        recipe = load_recipe("tiny", (*SMALL, *overrides))
        names = quantizable(model.config, recipe.Compress.Quantization)
        formats: dict[str, Format] = dict.fromkeys(names, "int8")
        if recipe.Compress.Quantization.weight_bits == 4:
            formats = {}
        return len(smoothing_factors(recipe, model, [TOKENS], formats))

    plain = gpt2(tmp_path, byte_tokenizer)
    massive = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    bits, off = "Compress.Quantization.weight_bits=4", "Compress.Quantization.smoothing=False"
    assert not places(plain) and not places(massive, off) and not places(plain, bits, off)
    assert "smoothed" not in caplog.text
    places(massive), places(plain, bits)
    assert caplog.text.count("smoothed the inputs of") == 2


def test_static_scales_are_smoothed_for_all_text(
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "TOKENS", 48)  # what static scales cost: of the first row
    model = plant(llama(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    recipe = load_recipe("tiny", [*SMALL, "Gate.max_perplexity_increase=1e-9"])
    recipe.Compress.Quantization.activation_quantize_type = "moving_average_abs_max"
    plan = make_plan(model.config, recipe.Compress.Quantization)
    found = smoothing_factors(recipe, model, TOKENS.split(2), {})
    expected = find_factors(model, [TOKENS], plan.linears, False)
    of_first_row = find_factors(model, [TOKENS[:1]], plan.linears, False)
    assert found.keys() == expected.keys()
    for name, factors in expected.items():
        torch.testing.assert_close(found[name], factors)
    assert any(not torch.allclose(found[name], x) for name, x in of_first_row.items())


def test_static_scales_leave_room_for_other_text(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoothing, "STRENGTHS", (0.65, 0.8))
    monkeypatch.setattr(smoothing, "MEAN_STRENGTHS", ())
    monkeypatch.setattr(smoothing, "GAIN", float("inf"))
    model = llama(tmp_path, byte_tokenizer)
    name, inputs, weight = first_linear(model)
    x, w = (v.abs().amax(0) for v in (inputs, weight))
    settings = QuantizationSettings(activation_quantize_type="moving_average_abs_max")
    plan = make_plan(model.config, settings)
    factors = find_factors(model, [TOKENS], plan.linears, False)[name].flatten()
    torch.testing.assert_close(factors, x**0.65 / w**0.35)


def test_mean_magnitudes_are_balanced_for_gptq(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = llama(tmp_path, byte_tokenizer)
    name, inputs, weight = first_linear(model)
    weight[:, 3] = 0  # nothing to balance
    x, w = (v.abs().mean(0) for v in (inputs, weight))
    plan = make_plan(model.config, QuantizationSettings(weight_bits=4, group_size=32))
    factors = find_factors(model, [TOKENS], plan.linears, True)[name].flatten()
    expected = x**0.2 / w**0.8
    expected[3] = 1
    torch.testing.assert_close(factors, expected)


def first_linear(model: GPT) -> tuple[str, Tensor, Tensor]:
    """Its name, inputs for `TOKENS` (T, I), and weight (O, I)."""
    name, read = model.config.linear_names()[0], []
    linear = model.get_submodule(name)
    with linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])):
        model(TOKENS)
    assert isinstance(linear, nn.Linear)
    return name, read[0].detach().flatten(0, -2), linear.weight.data
