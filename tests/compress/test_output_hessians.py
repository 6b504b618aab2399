"""Hessians of outputs against the gradients of drawn predictions, from Jacobians."""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from lathe.compress.gptq import gptq
from lathe.compress.output_hessians import output_hessians, part_sizes, rounding_costs
from lathe.compress.plan import make_plan
from lathe.compress.sensitivity.measure import BatchMetric
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.architecture import Architecture
from lathe.model.block import Block
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.fake_quant import FakeQuantLinear
from lathe.model.families import GPT2, LLAMA, QWEN3
from lathe.model.gpt import GPT
from lathe.train.batches import EvalBatches, calibration_batches
from lathe_base.config.recipe import load_recipe
from tests.support.small_run import SMALL

FAMILIES = pytest.mark.parametrize("family", [GPT2, LLAMA, QWEN3], ids=lambda x: x.model_type)


def quantized(family: Architecture, layers: int = 2, vocabulary: int = 50) -> GPT:
    """A model to be rounded to 4 bits, but for one linear that stays in float."""
    groups = () if family is GPT2 else (2,) * layers
    shape = (4,) * layers, (96,) * layers
    model = GPT(GPTConfig(vocabulary, 16, 64, 16, *shape, architecture=family, kv_heads=groups))
    model.initialize(0.2, 1)
    settings = load_recipe(
        "tiny", ["Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=32"]
    ).Compress.Quantization
    kept = {f"{family.block(0)}.{family.row('heads').name}": "float"}
    fake_quant.insert(model, make_plan(model.config, settings, kept))  # type: ignore[arg-type]
    return model.eval()


def gradients(model: GPT, linear: FakeQuantLinear, tokens: Tensor) -> Tensor:
    """Gradients of the log-likelihood of drawn tokens by the linear's outputs, (N, T, O), from the
    Jacobian of the logits by what is added to the outputs of every token."""

    def logits(added: Tensor) -> Tensor:
        with linear.register_forward_hook(lambda _, __, y: y + added):
            out: Tensor = model(tokens[None])[0]
        return out

    nothing = torch.zeros(len(tokens), linear.out_features)
    jacobian = torch.autograd.functional.jacobian(logits, nothing)  # (T, V, T, O)
    p = logits(nothing).softmax(-1).detach()
    drawn = torch.multinomial(p, 4000, True, generator=torch.Generator().manual_seed(4)).T
    of_drawn = torch.nn.functional.one_hot(drawn, p.shape[1]) - p  # (N, T, V)
    return torch.einsum("ntv,tvso->nso", of_drawn, jacobian)


@FAMILIES
def test_they_are_those_of_drawn_tokens(family: Architecture) -> None:
    model = quantized(family)
    tokens = torch.randint(50, (5,), generator=torch.Generator().manual_seed(2))
    found = output_hessians(model, [tokens.expand(2000, 5)] * 2)
    linears = [x for block in model.blocks for x in fake_quant.int4_linears(block)]
    assert len(linears) == 7 and set(found) == set(linears)
    with fake_quant.in_float(model):
        for linear in linears:
            g = gradients(model, linear, tokens)
            norms, (part,) = g.norm(dim=-1), found[linear].parts
            expected = torch.einsum("nto,ntp->op", g / norms[..., None], g)
            assert (part - expected).norm() < 0.06 * expected.norm()
            counts = torch.cat(found[linear].norms)[..., 0].mean(0)
            torch.testing.assert_close(counts, norms.mean(0), rtol=0.06, atol=0)


@FAMILIES
def test_costs_of_rounding_are_those_of_drawn_tokens(family: Architecture) -> None:
    model = quantized(family)
    tokens = torch.randint(50, (5,), generator=torch.Generator().manual_seed(2))
    draw, rounded = torch.Generator().manual_seed(5), {}
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear):
            error = 0.01 * torch.randn(module.weight.shape, generator=draw)
            rounded[name] = module.weight.detach() + error
    found = rounding_costs(model, rounded, [tokens.expand(2000, 5)] * 2)
    assert found.keys() == rounded.keys()
    with fake_quant.in_float(model):
        for name, weight in rounded.items():
            inputs: list[Tensor] = []
            linear = model.get_submodule(name)
            assert isinstance(linear, FakeQuantLinear)
            with linear.register_forward_pre_hook(lambda _, x, seen=inputs: seen.append(x[0])):
                model(tokens[None])
            changes = inputs[0][0] @ (weight - linear.weight).T
            g = gradients(model, linear, tokens)
            expected = float((g * changes).detach().sum(-1).square().mean() / 2)
            assert found[name] == pytest.approx(expected, rel=0.1)


def test_a_token_without_a_gradient_does_not_count() -> None:
    model = quantized(LLAMA)
    last = model.blocks[-1]
    assert isinstance(last, Block)
    last.mlp.down_proj.weight.data.zero_()  # then nothing depends on what it reads
    found = output_hessians(model, [torch.randint(50, (2, 8))])
    (norms,) = found[last.mlp.gate_up_proj].norms
    (part,) = found[last.mlp.gate_up_proj].parts
    assert norms.shape == (2, 8, 1) and not norms.any() and not part.any()


def test_wide_linears_are_divided_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(3))]
    model = quantized(LLAMA)
    whole = output_hessians(model, tokens)
    monkeypatch.setattr("lathe.compress.output_hessians.MAX_OUTPUTS", 100)
    assert part_sizes(100) == [100] and part_sizes(192) == [96, 96] and part_sizes(301)[-1] == 73
    for linear, found in output_hessians(model, tokens).items():
        first, (matrix,) = 0, whole[linear].parts
        for part in found.parts:
            here = slice(first, first + len(part))
            torch.testing.assert_close(part, matrix[here, here])
            first += len(part)
        assert first == linear.out_features


@pytest.mark.slow
def test_with_them_predictions_change_less(
    small_dense: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(
        "tiny",
        (*SMALL, "Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=32"),
    )
    data, dense = TokenDataset.open(small_data), load_checkpoint(small_dense).model
    texts = [torch.from_numpy(x) for x in calibration_batches(recipe, data, 16)]
    measure = BatchMetric(
        "kl", [torch.from_numpy(x) for x in EvalBatches(recipe, data, 4, 8)], dense
    )
    costs = []
    for alone in (True, False):
        if alone:
            monkeypatch.setattr("lathe.compress.gptq.output_hessians", lambda *_: {})
        model = load_checkpoint(small_dense).model
        plan = make_plan(model.config, recipe.Compress.Quantization, {})
        fake_quant.insert(model, plan)
        gptq(model, texts)
        monkeypatch.undo()
        costs.append(fmean(measure(model)))
    assert costs[1] < 0.9 * costs[0]
