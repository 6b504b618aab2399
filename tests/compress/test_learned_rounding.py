"""Rounding learned block by block, against GPTQ, from which it starts."""

import pytest
import torch
from torch import Tensor, nn

from lathe.compress.gptq import gptq
from lathe.compress.learned_rounding import _Latent
from lathe.compress.plan import make_plan
from lathe.model import fake_quant
from lathe.model.architecture import Architecture
from lathe.model.block import Block
from lathe.model.config import GPTConfig
from lathe.model.fake_quant import FakeQuantLinear, in_float
from lathe.model.families import GPT2, LLAMA, QWEN3
from lathe.model.gpt import GPT
from lathe.model.integer_weights import QuantizedWeight, fake_quantize_weight
from lathe.model.quantization import WeightFormat
from lathe_base.config.recipe import load_recipe

FAMILIES = pytest.mark.parametrize("family", [GPT2, LLAMA, QWEN3], ids=lambda x: x.model_type)


def quantized(family: Architecture) -> GPT:
    """A model of two blocks, one of whose linears is in INT8 and one in float, to be rounded to 4
    bits in groups that fill 96 inputs unevenly."""
    groups = () if family is GPT2 else (2, 2)
    config = GPTConfig(50, 16, 64, 16, (4, 4), (96, 96), architecture=family, kv_heads=groups)
    model = GPT(config)
    model.initialize(0.2, 1)
    model.get_parameter(f"{family.block(0)}.{family.row('heads').name}.weight").data[:, :64] = 0
    settings = load_recipe(
        "tiny",
        [
            "Compress.Quantization.weight_bits=4",
            "Compress.Quantization.activation_quantize_type=none",
        ],
    ).Compress.Quantization
    kept = {
        f"{family.block(1)}.{family.row('heads').name}": "float",
        f"{family.block(1)}.{family.row('channels').name}": "weight_only_int8",
    }
    fake_quant.insert(model, make_plan(config, settings, kept))  # type: ignore[arg-type]
    return model


def tokens(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(50, (8, 16, 16), generator=generator))


@torch.no_grad()
def block_errors(model: GPT, original: GPT) -> list[float]:
    """Relative squared error of every block's output on other text than rounding reads."""
    hidden, errors = original.embed(torch.cat(tokens(2))), []
    for block, float_block in zip(model.blocks, original.blocks, strict=True):
        assert isinstance(float_block, Block)
        with in_float(float_block):
            expected = float_block(hidden)
        errors.append(float((block(hidden) - expected).square().sum() / expected.square().sum()))
        hidden = expected
    return errors


@pytest.mark.slow
def test_it_is_closer_to_the_float_blocks_than_gptq_on_other_text() -> None:
    original, errors = quantized(LLAMA), []
    for steps in (0, 60):
        model = quantized(LLAMA)
        gptq(model, tokens(1), steps)
        errors.append(sum(block_errors(model, original)))
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("size", [32, 64])
def test_rounding_again_changes_nothing(size: int, zero_points: bool) -> None:
    """Whatever integers and scales training ends with, they are found again in the weights."""
    torch.manual_seed(0)
    fmt = WeightFormat.grouped(size, 4, zero_points)
    linear = FakeQuantLinear(nn.Linear(96, 40), None, QuantizedWeight(fmt))
    before = linear.weight.detach().clone()
    before[3, :64] = 0
    linear.weight.data.copy_(fake_quantize_weight(before, fmt))
    latent = _Latent(linear, before)
    latent.integers.data.add_(torch.randn_like(latent.integers), alpha=3)
    latent.change.data.add_(torch.randn_like(latent.change), alpha=0.1)
    latent.clamp()
    latent.freeze()
    learned = latent(linear.weight).detach()
    assert not torch.equal(learned, linear.weight)
    torch.testing.assert_close(fake_quantize_weight(learned, fmt), learned, rtol=0, atol=0)


def test_what_does_not_help_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [quantized(LLAMA), quantized(LLAMA)]
    gptq(models[0], tokens(1))
    monkeypatch.setattr("lathe.compress.learned_rounding.TRAVEL", 1000.0)
    gptq(models[1], tokens(1), 5)
    found, expected = (model.state_dict() for model in models)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@FAMILIES
def test_in_float_computes_what_the_model_did_before(family: Architecture) -> None:
    model, plain = quantized(family), GPT(quantized(family).config)
    plain.load_state_dict(model.state_dict())
    x = plain.embed(tokens(1)[0])
    for block, expected in zip(model.blocks, plain.blocks, strict=True):
        with in_float(block):
            assert torch.equal(block(x), expected(x))
        assert not torch.equal(block(x), expected(x))
