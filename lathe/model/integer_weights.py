"""Quantized weights: how a weight becomes integers and scales, and what value they stand for.

With one scale for a row or for the whole weight, integers are symmetric, and the scale is the
largest magnitude divided by the largest integer.

With one scale for a group of consecutive inputs, weights are those of onnxruntime's `MatMulNBits`:
4-bit integers, from -8 to 7, or 8-bit ones, from -128 to 127, times a float16 scale. The scale is
the entry of largest magnitude divided by the lowest integer, so that all integers are used
(llama.cpp's Q4_0). Training thus computes with the values of a GGUF or compressed-tensors file. If
the number of inputs is not a multiple of the group size, the last group is padded with zeros.

Shapes: O outputs of a linear, I its inputs, G groups of a row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.model.quantization import INT8, LinearFormat, WeightFormat

SCALE_OF_ZEROS = 1e-8
"""Scale of a group whose own is zero in float16: zeros, or entries below 1e-7. It is small because
`MatMulNBits` adds and subtracts 8 or 128 times the scale times the inputs, with a float32 rounding
error that grows with the scale."""

MAX_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class IntegerWeight:
    """A quantized weight, as files store it.

    Attributes:
        fmt: the format of its linear.
        values: int8 (O, I).
        scales: float32 (O, G); a group has `fmt.weight.group_size` inputs (the last one may have
            fewer), or the whole row without groups.
    """

    fmt: LinearFormat
    values: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return self.fmt.weight.bits

    @property
    def floats(self) -> Tensor:
        """The dequantized values, float32 (O, I)."""
        return self.values * self.spread_scales(1)

    def rows(self, order: Tensor) -> "IntegerWeight":
        """The rows `order`, in that order."""
        return replace(self, values=self.values[order], scales=self.scales[order])

    def spread_scales(self, size: int) -> Tensor:
        """Scales (O, I / size) for groups of `size` inputs, a divisor of the group size and of
        I."""
        count = self.values.shape[1] // size
        per_group = (self.fmt.weight.group_size or self.values.shape[1]) // size
        return self.scales.repeat_interleave(per_group, 1)[:, :count]


@torch.no_grad()
def integer_weight(weight: Tensor, fmt: LinearFormat, scale: Tensor | None = None) -> IntegerWeight:
    """Round a weight (O, I) to integers: those of training, of the ONNX graph and of all files.

    Args:
        scale: scale of the whole weight, if `weight` is only a part of it.
    """
    values, scales = _rounded(weight, fmt.weight, scale)
    integers = values.to(torch.int8)
    if fmt.weight.group_size:
        return IntegerWeight(fmt, integers.flatten(1)[:, : weight.shape[1]], scales.squeeze(-1))
    return IntegerWeight(fmt, integers, scales.expand(len(weight), 1).contiguous())


def fake_quantize_weight(weight: Tensor, fmt: WeightFormat = INT8) -> Tensor:
    """Round a weight (O, I) to its format and back, with straight-through gradients (Bengio et al.
    2013)."""
    if fmt.group_size:
        y: Tensor = _RoundGroups.apply(weight, fmt)  # type: ignore[no-untyped-call]
        return y
    return round_to_levels(weight, weight_scales(weight, fmt), *fmt.range)


def weight_scales(weight: Tensor, fmt: WeightFormat = INT8) -> Tensor:
    """Scales of a weight (O, I): (1, 1) for the whole, (O, 1) for rows, or (O, G, 1) for groups."""
    weight = weight.detach()
    if not fmt.group_size:
        dims = (1,) if fmt.quantize_type == "channel_wise_abs_max" else (0, 1)
        absmax = weight.abs().amax(dims, keepdim=True)
        return torch.where(absmax > 0, absmax, torch.ones_like(absmax)) / fmt.levels
    groups = split(weight, fmt.group_size)
    # With its sign: a positive extreme has a negative scale, because only -8 has no counterpart.
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    # Clamped, so that integers times scales are finite.
    scale = (extreme / fmt.range[0]).clamp(-MAX_SCALE, MAX_SCALE).half().to(groups.dtype)
    return torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)


def exceeds_scales(weight: Tensor, fmt: WeightFormat) -> bool:
    """Test whether an entry exceeds the lowest integer times the largest scale."""
    return float(weight.detach().abs().max()) > -fmt.range[0] * MAX_SCALE


def split(x: Tensor, size: int) -> Tensor:
    """(..., I) -> (..., G, size), padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).reshape(*x.shape[:-1], -1, size)


def round_to_levels(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Round x to integers from `low` to `high` times the scale, with straight-through gradients: a
    clipped entry has none."""
    y: Tensor = _RoundToLevels.apply(x, scale, low, high)  # type: ignore[no-untyped-call]
    return y


def _rounded(
    weight: Tensor, fmt: WeightFormat, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Integers, in float, and scales of a weight (O, I); with groups, (O, G, size) and (O, G,
    1)."""
    scale = weight_scales(weight, fmt) if scale is None else scale
    entries = split(weight, fmt.group_size) if fmt.group_size else weight
    return (entries / scale).round_().clamp_(*fmt.range), scale


class _RoundGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, fmt: WeightFormat) -> Tensor:
        integers, scale = _rounded(weight, fmt)
        return integers.mul_(scale).flatten(-2)[:, : weight.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _RoundToLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        q = (x / scale).round_()  # half to even, as ONNX QuantizeLinear
        clamped = q.clamp(low, high)
        ctx.save_for_backward(q == clamped)
        return clamped.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None, None
