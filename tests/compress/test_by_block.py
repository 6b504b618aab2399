"""Passes one block after the other: the bits of the whole model's, with one block on the device."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lathe.compress.activation import massive_tokens
from lathe.compress.criteria import gate_slopes, importance
from lathe.compress.gptq import gptq, gptq_bytes
from lathe.compress.plan import make_plan, named_formats
from lathe.compress.reconstruct import reconstruct, reconstruct_bytes, reconstruct_layers
from lathe.compress.sensitivity.measure import (
    BatchMetric,
    estimate_costs,
    input_distributions,
    weight_distributions,
)
from lathe.compress.smoothing import find_factors
from lathe.compress.widths import KeptUnits
from lathe.model import fake_quant
from lathe.model.architecture import Architecture
from lathe.model.by_block import hidden_states
from lathe.model.config import GPTConfig
from lathe.model.fake_quant import observers
from lathe.model.families import GPT2, GPT_NEOX, LLAMA
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe.train.loss import batch_losses, next_token_loss
from lathe.train.room import pass_bytes
from lathe_base.config.recipe import load_recipe
from tests.support.pretend_gpu import GPU, pretend_gpu
from tests.support.tables import quick_only

FAMILIES = pytest.mark.parametrize(
    "family", [GPT2, LLAMA, GPT_NEOX], ids=["tied", "groups", "parallel"]
)
VOCABULARY = 150
STATIC = ("activation_quantize_type=moving_average_abs_max", "quantize_embedding=True")
INT4 = ("weight_bits=4", "group_size=32", "quantize_embedding=True")


def make_model(family: Architecture, layers: int = 2) -> GPT:
    groups = (2,) * layers if family is LLAMA else ()
    shape = (4,) * layers, (96,) * layers
    model = GPT(GPTConfig(VOCABULARY, 48, 64, 16, *shape, architecture=family, kv_heads=groups))
    model.initialize(0.2, 1)
    return model.eval()


def texts() -> list[Tensor]:
    """Three batches (2, 25)."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(VOCABULARY, (3, 2, 25), generator=generator))


def plan(model: GPT, options: tuple[str, ...]) -> QuantizationPlan:
    settings = load_recipe(
        "tiny", [f"Compress.Quantization.{option}" for option in options]
    ).Compress.Quantization
    return make_plan(model.config, settings, named_formats(model.config, settings, None))


def calibrated(model: GPT, batches: list[Tensor]) -> Any:
    fake_quant.insert(model, plan(model, STATIC))
    return fake_quant.calibrate(model, batches)


def rounded(options: tuple[str, ...]) -> Callable[[GPT, list[Tensor]], Any]:
    def run(model: GPT, batches: list[Tensor]) -> Any:
        fake_quant.insert(model, plan(model, options))
        fake_quant.calibrate(model, batches)
        costs = gptq(model, batches)
        return costs, {name: x.detach() for name, x in model.named_parameters()}

    return run


def metric(name: Any) -> Callable[[GPT, list[Tensor]], list[float]]:
    def run(model: GPT, batches: list[Tensor]) -> list[float]:
        measure = BatchMetric(name, batches, model)
        with fake_quant.inserted(model, plan(model, INT4)):
            return measure(model)

    return run


def costs(model: GPT, batches: list[Tensor]) -> Any:
    scales = plan(model, INT4)
    return estimate_costs(model, {"int4": scales}, list(scales.linears), batches)


def distributions(model: GPT, batches: list[Tensor]) -> Any:
    scales = plan(model, INT4)
    names = list(scales.linears)
    weights = weight_distributions(model, scales, names, batches[0].device)
    return weights, input_distributions(model, scales, names, batches)


def slopes(model: GPT, batches: list[Tensor]) -> list[Tensor]:
    found = gate_slopes(model, batches)
    return [*found.heads, *found.channels]


def scores(criterion: str) -> Callable[[GPT, list[Tensor]], list[Tensor]]:
    def run(model: GPT, batches: list[Tensor]) -> list[Tensor]:
        found = importance(model, criterion, batches)
        return [*found.heads, *found.channels]

    return run


def fitted(model: GPT, batches: list[Tensor]) -> dict[str, Tensor]:
    groups = model.config.n_kv_head[0]
    kept = KeptUnits(torch.arange(1, groups), torch.arange(0, 96, 2))
    reconstruct(model, [kept] * model.config.n_layer, batches)
    return {name: x.detach() for name, x in model.named_parameters()}


def layers_fitted(model: GPT, batches: list[Tensor]) -> dict[str, Tensor]:
    reconstruct_layers(model, [0], batches)
    return {name: x.detach() for name, x in model.named_parameters()}


PASSES: dict[str, Callable[[GPT, list[Tensor]], Any]] = {
    "hidden": hidden_states,
    "losses": batch_losses,
    "calibration": calibrated,
    "gptq static": rounded(STATIC),
    "gptq int4": rounded(INT4),
    "smoothing": lambda model, x: find_factors(model, x, plan(model, INT4).linears, False),
    "balanced smoothing": lambda model, x: find_factors(model, x, plan(model, INT4).linears, True),
    "massive": massive_tokens,
    "kl": metric("kl"),
    "accuracy": metric("accuracy"),
    "costs": costs,
    "distributions": distributions,
    "slopes": slopes,
    "activation": scores("activation"),
    "fpgm": scores("fpgm"),
    "fitted": fitted,
    "layers fitted": layers_fitted,
}


def flat(found: Any) -> list[Any]:
    """Tensors become lists, and everything comparable."""
    if isinstance(found, Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return [(key, flat(value)) for key, value in found.items()]
    return [flat(x) for x in found] if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize(
    "name, family",
    quick_only(
        product(PASSES, (GPT2, LLAMA, GPT_NEOX)),
        [
            ("calibration", GPT2),
            *((name, LLAMA) for name in PASSES if name != "accuracy"),
        ],
    ),
)
def test_on_a_gpu_a_pass_finds_the_same_with_the_memory_of_one_block(
    name: str, family: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, peaks = PASSES[name], []
    for layers in (2, 3):
        model = make_model(family, layers)
        before = [id(x) for x in model.parameters()], [x.data_ptr() for x in model.parameters()]
        with pretend_gpu(monkeypatch, model) as gpu:
            found = flat(run(model, [tokens.to(GPU) for tokens in texts()]))
        peaks.append(gpu.peak)
        after = [id(x) for x in model.parameters()], [x.data_ptr() for x in model.parameters()]
        assert after == before
        assert found == flat(run(make_model(family, layers), texts()))
    config = model.config
    per_layer = 4 * 3 * 2 * (config.n_head[0] + config.n_inner[0])  # scores, of three batches
    assert peaks[1] <= peaks[0] + 2 * per_layer
    if "gptq" in name:
        estimate = gptq_bytes(model, 50)
    else:
        estimate = pass_bytes(model, 50, name in ("costs", "slopes"))
        estimate += reconstruct_bytes(model) if "fitted" in name else 0
    assert peaks[1] < estimate


@FAMILIES
def test_calibration_is_that_of_the_whole_model(family: Architecture) -> None:
    model, whole = make_model(family), make_model(family)
    found = calibrated(model, texts())
    fake_quant.insert(whole, plan(whole, STATIC))
    tracked = dict(observers(whole))
    for observer in tracked.values():
        observer.peaks = []
    with torch.no_grad():
        for text in torch.split(torch.cat(texts()), 1):
            for observer in tracked.values():
                observer.peaks.append(torch.tensor(0.0))
            whole(text)
    means = {name: torch.stack(observer.peaks).mean() for name, observer in tracked.items()}
    assert found == {name: float(mean) / 127 for name, mean in means.items()}


@FAMILIES
def test_gradients_are_those_of_the_whole_model(family: Architecture) -> None:
    model = make_model(family)
    found = [slopes(model, [batch]) for batch in texts()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    for batch, ours in zip(texts(), found, strict=True):
        gates = [torch.ones_like(x, requires_grad=True) for x in ours]
        linears = [
            block.get_submodule(family.row(units).name)
            for units in ("heads", "channels")
            for block in model.blocks
        ]

        def apply(gate: Tensor, inputs: tuple[Tensor]) -> tuple[Tensor]:
            x = inputs[0].view(*inputs[0].shape[:2], gate.shape[1], -1)
            return ((x * gate[:, None, :, None]).flatten(2),)

        hooks = [
            linear.register_forward_pre_hook(lambda _, inputs, gate=gate: apply(gate, inputs))
            for linear, gate in zip(linears, gates, strict=True)
        ]
        expected = torch.autograd.grad(next_token_loss(model, batch) * len(batch), gates)
        for hook in hooks:
            hook.remove()
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@FAMILIES
def test_hidden_states_are_those_of_the_whole_model(family: Architecture) -> None:
    model = make_model(family)
    with torch.no_grad():
        expected = [model.hidden(tokens) for tokens in texts()]
        losses = [float(next_token_loss(model, tokens)) for tokens in texts()]
    assert flat(hidden_states(model, texts())) == flat(expected)
    assert batch_losses(model, texts()) == losses
