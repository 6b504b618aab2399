"""Quantized weights: how a weight becomes integers and scales, and what value they stand for.

With one scale for a row or for the whole weight, integers are symmetric, and the scale is the
largest magnitude divided by the largest integer.

With one scale for a group of consecutive inputs, weights are those of onnxruntime's `MatMulNBits`:
4-bit integers, from -8 to 7, or 8-bit ones, from -128 to 127, times a float16 scale. The scale is
the entry of largest magnitude divided by the lowest integer, so that all integers are used
(llama.cpp's Q4_0). Training thus computes with the values of a GGUF or compressed-tensors file. If
the number of inputs is not a multiple of the group size, the last group is padded with zeros.

With zero points, a weight is (integer - zero point) * scale, and a group's lowest and highest entry
have the integers -8 and 7. llama.cpp's Q4_1 stores the lowest value in float16, not the zero point:
scales have `SCALE_BITS` significant bits, so that their product with a zero point is exact there.

Shapes: O outputs of a linear, I its inputs, G groups of a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.model.quantization import INT8, LinearFormat, WeightFormat

SCALE_OF_ZEROS = 1e-8
"""Scale of a group whose own is zero in float16: zeros, or entries below 1e-7. It is small because
`MatMulNBits` adds and subtracts 8 or 128 times the scale times the inputs, with a float32 rounding
error that grows with the scale."""

MAX_SCALE = torch.finfo(torch.float16).max

SCALE_BITS = 7  # of the 11 of float16; a zero point has the other 4
_DROPPED = 24 - SCALE_BITS  # bits of a float32


class Grid(NamedTuple):
    """The values that a weight can have: (integer - zero_point) * scale."""

    scale: Tensor
    zero_point: Tensor | float = 0.0


@dataclass(frozen=True)
class IntegerWeight:
    """A quantized weight, as files store it.

    Attributes:
        fmt: the format of its linear.
        values: int8 (O, I).
        scales: float32 (O, G); a group has `fmt.weight.group_size` inputs (the last one may have
            fewer), or the whole row without groups.
        zero_points: int8 (O, G), or None where they are zero.
    """

    fmt: LinearFormat
    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return self.fmt.weight.bits

    @property
    def floats(self) -> Tensor:
        """The dequantized values, float32 (O, I)."""
        if self.zero_points is None:
            return self.values * self.spread(self.scales, 1)
        return (self.values - self.spread(self.zero_points, 1)) * self.spread(self.scales, 1)

    def rows(self, order: Tensor) -> "IntegerWeight":
        """The rows `order`, in that order."""
        zeros = None if self.zero_points is None else self.zero_points[order]
        return IntegerWeight(self.fmt, self.values[order], self.scales[order], zeros)

    def spread(self, of_groups: Tensor, size: int) -> Tensor:
        """Scales or zero points (O, G) as those (O, I / size) of groups of `size` inputs, a divisor
        of the group size and of I."""
        count = self.values.shape[1] // size
        per_group = (self.fmt.weight.group_size or self.values.shape[1]) // size
        return of_groups.repeat_interleave(per_group, 1)[:, :count]


@torch.no_grad()
def integer_weight(weight: Tensor, fmt: LinearFormat, scale: Tensor | None = None) -> IntegerWeight:
    """Round a weight (O, I) to integers: those of training, of the ONNX graph and of all files.

    Args:
        scale: scale of the whole weight, if `weight` is only a part of it.
    """
    grid = weight_grid(weight, fmt.weight) if scale is None else Grid(scale)
    integers = _rounded(weight, fmt.weight, grid).to(torch.int8)
    if not fmt.weight.group_size:
        return IntegerWeight(fmt, integers, grid.scale.expand(len(weight), 1).contiguous())
    zeros = grid.zero_point
    zero_points = zeros.squeeze(-1).to(torch.int8) if isinstance(zeros, Tensor) else None
    integers = integers.flatten(1)[:, : weight.shape[1]]  # without the last group's padding
    return IntegerWeight(fmt, integers, grid.scale.squeeze(-1), zero_points)


def fake_quantize_weight(weight: Tensor, fmt: WeightFormat = INT8) -> Tensor:
    """Round a weight (O, I) to its format and back, with straight-through gradients (Bengio et al.
    2013)."""
    if fmt.group_size:
        y: Tensor = _RoundGroups.apply(weight, fmt)  # type: ignore[no-untyped-call]
        return y
    return round_to_levels(weight, weight_scales(weight, fmt), *fmt.range)


def weight_scales(weight: Tensor, fmt: WeightFormat = INT8) -> Tensor:
    """Scales of a weight (O, I) without zero points: (1, 1) for the whole, (O, 1) for rows, or (O,
    G, 1) for groups."""
    weight = weight.detach()
    if not fmt.group_size:
        dims = (1,) if fmt.quantize_type == "channel_wise_abs_max" else (0, 1)
        absmax = weight.abs().amax(dims, keepdim=True)
        # A row of zeros is zeros with any scale; 1 is not divided by zero.
        return torch.where(absmax > 0, absmax, torch.ones_like(absmax)) / fmt.levels
    groups = split(weight, fmt.group_size)
    # With its sign: a positive extreme has a negative scale, because only -8 has no counterpart.
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = storable_scale(extreme / fmt.range[0], fmt)
    return torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)


def weight_grid(weight: Tensor, fmt: WeightFormat) -> Grid:
    """Scales and zero points of a weight (O, I), in the shape of `weight_scales`."""
    if not fmt.zero_points:
        return Grid(weight_scales(weight, fmt))
    low, high = fmt.range
    # A group without negative entries begins at zero, and one without positive entries ends there.
    lowest, highest = split(weight.detach(), fmt.group_size).float().aminmax(dim=-1, keepdim=True)
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    extent = highest - lowest
    scale = storable_scale(extent / (high - low), fmt)
    # The next lower one where it was rounded up: with it the extremes have the integers -8 and 7.
    lower = storable_scale(scale * (1 - 2**-SCALE_BITS), fmt)
    scale = torch.where(scale * (high - low) > extent, lower, scale)
    scale = torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)
    # Rounded with the scale that is stored, so that files and training have the same integers.
    zero_point = (low - lowest / scale).round_().clamp_(low, high)
    return Grid(scale.to(weight.dtype), zero_point.to(weight.dtype))


def storable_scale(scale: Tensor, fmt: WeightFormat) -> Tensor:
    """The nearest scale of a group that files can store, in `scale`'s type."""
    if not fmt.zero_points:
        return scale.clamp(-MAX_SCALE, MAX_SCALE).half().to(scale.dtype)
    # Of positive floats, rounding the bits to nearest rounds the number.
    bits = scale.float().clamp(max=MAX_SCALE / 2**fmt.bits).view(torch.int32)
    kept = ((bits + (1 << (_DROPPED - 1))) >> _DROPPED) << _DROPPED
    return kept.view(torch.float32).half().to(scale.dtype)


def exceeds_scales(weight: Tensor, fmt: WeightFormat) -> bool:
    """Test whether an entry exceeds the lowest integer times the largest scale."""
    largest = MAX_SCALE / (2**fmt.bits if fmt.zero_points else 1)
    return float(weight.detach().abs().max()) > -fmt.range[0] * largest


def split(x: Tensor, size: int) -> Tensor:
    """(..., I) -> (..., G, size), padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).reshape(*x.shape[:-1], -1, size)


def round_to_levels(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Round x to integers from `low` to `high` times the scale, with straight-through gradients: a
    clipped entry has none."""
    y: Tensor = _RoundToLevels.apply(x, scale, low, high)  # type: ignore[no-untyped-call]
    return y


def _rounded(weight: Tensor, fmt: WeightFormat, grid: Grid) -> Tensor:
    """Integers, in float, of a weight (O, I); with groups, (O, G, size)."""
    entries = split(weight, fmt.group_size) if fmt.group_size else weight
    return (entries / grid.scale).round_().add_(grid.zero_point).clamp_(*fmt.range)


class _RoundGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, fmt: WeightFormat) -> Tensor:
        grid = weight_grid(weight, fmt)
        values = _rounded(weight, fmt, grid).sub_(grid.zero_point).mul_(grid.scale)
        return values.flatten(-2)[:, : weight.shape[1]]

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


class QuantizedWeight:
    """`fake_quantize_weight` with a cache, used while gradients are off and the weight is
    unchanged."""

    def __init__(self, fmt: WeightFormat) -> None:
        self.fmt = fmt
        self._made_from: tuple[int, int] | None = None
        self._value: Tensor | None = None

    def clear(self) -> None:
        """Empty the cache."""
        self._made_from = self._value = None

    def __call__(self, weight: Tensor) -> Tensor:
        # A compiled graph has no address of a weight, and rounds it in the kernel that reads it.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # A fused optimizer does not raise _version.
            self.clear()
            return fake_quantize_weight(weight, self.fmt)
        made_from = weight.data_ptr(), weight._version
        if self._value is None or made_from != self._made_from:
            self._made_from = made_from
            self._value = fake_quantize_weight(weight, self.fmt)
        return self._value
