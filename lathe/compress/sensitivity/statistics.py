"""What there is to quantize: the spread of every linear's weights and inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lathe.model import fake_quant
from lathe.model.config import HEAD, QuantizationPlan
from lathe.model.gpt import GPT

SAMPLE = 2**16  # values of a tensor that its quartiles are taken from


@dataclass(frozen=True)
class Distribution:
    """The values of a weight or an activation; the quartiles are those of 65,536 random ones
    where there are more.

    Attributes:
        channel_spread: largest absolute maximum of a channel (a weight's row, which is an output;
            an activation's feature) over the median one; large where few channels set the range
            of all. None where the median is 0.
        sqnr_db: signal to quantization noise, 10 log10(sum x^2 / sum (x_q - x)^2), decibels; None
            where there is no noise. Each bit is worth 6 dB.
    """

    min: float
    q1: float
    median: float
    q3: float
    max: float
    absmax: float
    channel_spread: float | None
    sqnr_db: float | None


@dataclass
class Accumulator:
    """The distribution of values that come in parts."""

    n_parts: int
    sample: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    high: list[Tensor] = field(default_factory=list)
    signal: float = 0.0
    noise: float = 0.0

    def add(self, x: Tensor, quantized: Tensor, channel: int) -> None:
        """`x`, and it quantized, both (rows, columns); dimension `channel` has the channels."""
        self.sample.append(_draw(x.flatten(), SAMPLE // self.n_parts))
        self.low.append(x.amin(1 - channel))
        self.high.append(x.amax(1 - channel))
        self.signal += float(x.double().square().sum())
        self.noise += float((quantized - x).double().square().sum())

    def distribution(self) -> Distribution:
        low, high = torch.stack(self.low).amin(0), torch.stack(self.high).amax(0)  # a channel each
        absmax = torch.maximum(-low, high)
        typical = float(absmax.median())
        quartiles = torch.cat(self.sample).quantile(torch.tensor([0.25, 0.5, 0.75]))
        q1, median, q3 = quartiles.tolist()
        return Distribution(
            min=float(low.min()),
            q1=q1,
            median=median,
            q3=q3,
            max=float(high.max()),
            absmax=float(absmax.max()),
            channel_spread=float(absmax.max()) / typical if typical else None,
            sqnr_db=10 * math.log10(self.signal / self.noise)
            if self.signal and self.noise
            else None,
        )


def fake_quantize_input(x: Tensor, scale: float) -> Tensor:
    """An activation as it is read at a static quantum."""
    return torch.fake_quantize_per_tensor_affine(
        x, scale, 0, -fake_quant.LEVELS - 1, fake_quant.LEVELS
    )


def weight_of(model: GPT, name: str) -> Tensor:
    """The weight (out, in) of a linear; of the tied head the embedding's table."""
    return model.get_parameter("wte.weight" if name == HEAD else f"{name}.weight")


def fake_quantize_weight(weight: Tensor, plan: QuantizationPlan, name: str) -> Tensor:
    """The weight of the linear `name` as the plan has it read."""
    if name == HEAD:
        return fake_quant.fake_quantize_weight(weight, "channel_wise_abs_max")
    return fake_quant.fake_quantize_weight(weight, plan.weight_quantize_type, plan.weight_bits)


@torch.no_grad()
def weight_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str]
) -> dict[str, Distribution]:
    """Of the weights (out, in) of `names`, by name."""
    found = {}
    for name in names:
        weight = weight_of(model, name)
        values = Accumulator(1)
        values.add(weight, fake_quantize_weight(weight, plan, name), channel=0)
        found[name] = values.distribution()
    return found


@torch.no_grad()
def input_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str], batches: Sequence[Tensor]
) -> dict[str, Distribution]:
    """Of what the linears `names` of a float model read, by name.

    Args:
        plan: the scales of `names`.
        batches: tokens (B, T) each.
    """
    found = {name: Accumulator(len(batches)) for name in names}

    def watch(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2)  # (B * T, features)
        found[name].add(x, fake_quantize_input(x, plan.activation_scales[name]), channel=1)

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
    return {name: values.distribution() for name, values in found.items()}


def _draw(values: Tensor, n: int) -> Tensor:
    """All of a flat tensor on the CPU, or `n` of it, always the same ones."""
    if len(values) > n:
        chosen = torch.randint(len(values), (n,), generator=torch.Generator().manual_seed(0))
        values = values[chosen.to(values.device)]
    return values.float().cpu()
