"""Statistics of every linear's weights and inputs, which show how hard they are to quantize."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lathe.compress.sensitivity.accumulator import Accumulator
from lathe.compress.sensitivity.result import Distribution
from lathe.model.architecture import HEAD
from lathe.model.fake_quant import round_activation
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import ACTIVATION_LEVELS, LinearFormat, QuantizationPlan


def fake_quantize_input(x: Tensor, fmt: LinearFormat) -> Tensor:
    """The fake-quantized input of a linear."""
    if fmt.activation is None:
        return x
    if fmt.activation == "dynamic_int8":
        return round_activation(x, fmt.weight.group_size)
    low, high = -ACTIVATION_LEVELS - 1, ACTIVATION_LEVELS
    return torch.fake_quantize_per_tensor_affine(x, fmt.activation_scale, 0, low, high)


def linear_weight(model: GPT, name: str) -> Tensor:
    """The weight (out, in) of a linear; for a tied head the embedding table."""
    path = model.config.tables[-1] if name == HEAD else name
    return model.get_parameter(f"{path}.weight")


@torch.no_grad()
def weight_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str]
) -> dict[str, Distribution]:
    """Statistics of the weights (out, in) of `names`, by name."""
    distributions = {}
    for name in names:
        weight = linear_weight(model, name)
        values = Accumulator(1)
        _add(values, weight, fake_quantize_weight(weight, plan.linears[name].weight), channel=0)
        distributions[name] = values.distribution()
    return distributions


@torch.no_grad()
def input_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str], batches: Sequence[Tensor]
) -> dict[str, Distribution]:
    """Statistics of the inputs of the linears `names` of a float model, by name.

    Args:
        plan: the scales of `names`.
        batches: tokens (B, T) each.
    """
    accumulators = {name: Accumulator(len(batches)) for name in names}

    def watch(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2)  # (B * T, features)
        _add(accumulators[name], x, fake_quantize_input(x, plan.linears[name]), channel=1)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: watch(name, *args)
        )
        for name in names
        if name != HEAD
    ]
    try:
        for tokens in batches:
            hidden = model.hidden(tokens)
            if HEAD in names:
                watch(HEAD, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return {name: values.distribution() for name, values in accumulators.items()}


def _add(values: Accumulator, x: Tensor, quantized: Tensor, channel: int) -> None:
    """Add `x` and its quantized values, both (rows, columns), with channels in dimension
    `channel`."""
    flat, index = x.flatten(), values.chosen(x.numel())
    sample = flat if index is None else flat[torch.from_numpy(index).to(x.device)]
    values.add(
        sample.float().cpu().numpy(),
        x.amin(1 - channel).float().cpu().numpy(),
        x.amax(1 - channel).float().cpu().numpy(),
        float(x.double().square().sum()),
        float((quantized - x).double().square().sum()),
        x.abs().amax(1).float().cpu().numpy() if channel == 1 else None,
    )
