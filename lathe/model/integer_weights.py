"""Quantized weights: how a weight becomes integers and scales, and what value they stand for.

`weight_rounding` chooses one of the classes here for a format. Training computes with what its
`fake_quantize` returns, and files store what its `pack` returns: the same integers.

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


class RowRounding:
    """Symmetric integers with one scale for a row, or for the whole weight: its largest magnitude
    divided by the largest integer."""

    def __init__(self, fmt: WeightFormat) -> None:
        self.fmt = fmt

    def grid(self, weight: Tensor) -> Grid:
        """Scales and zero points of a weight (O, I): (1, 1) for the whole, (O, 1) for rows, or (O,
        G, 1) for groups."""
        dims = (1,) if self.fmt.quantize_type == "channel_wise_abs_max" else (0, 1)
        absmax = weight.detach().abs().amax(dims, keepdim=True)
        # A row of zeros is zeros with any scale; 1 is not divided by zero.
        return Grid(torch.where(absmax > 0, absmax, torch.ones_like(absmax)) / self.fmt.levels)

    def storable(self, scale: Tensor) -> Tensor:
        """The nearest scales that files can store, in `scale`'s type."""
        return scale

    def exceeds_scales(self, weight: Tensor) -> bool:
        """Test whether an entry exceeds the lowest integer times the largest scale."""
        return False

    def round(self, weight: Tensor, grid: Grid) -> Tensor:
        """Integers, in float, of a weight (O, I); with groups, (O, G, size)."""
        return (weight / grid.scale).round_().add_(grid.zero_point).clamp_(*self.fmt.range)

    def fake_quantize(self, weight: Tensor) -> Tensor:
        """Round a weight (O, I) and back, with straight-through gradients (Bengio et al. 2013)."""
        return round_to_levels(weight, self.grid(weight).scale, *self.fmt.range)

    def pack(self, weight: Tensor, grid: Grid, fmt: LinearFormat) -> IntegerWeight:
        """A weight (O, I) as files store it; `fmt` is that of its linear."""
        integers = self.round(weight, grid).to(torch.int8)
        return IntegerWeight(fmt, integers, grid.scale.expand(len(weight), 1).contiguous())


class GroupRounding(RowRounding):
    """Integers with one scale for a group of consecutive inputs, as in onnxruntime's `MatMulNBits`:
    4-bit ones, from -8 to 7, or 8-bit ones, from -128 to 127, times a float16 scale.

    The scale is the entry of largest magnitude divided by the lowest integer, so that all integers
    are used (llama.cpp's Q4_0). Training thus computes with the values of a GGUF or
    compressed-tensors file. If the number of inputs is not a multiple of the group size, the last
    group is padded with zeros.
    """

    @property
    def max_scale(self) -> float:
        """The largest scale that files can store."""
        return float(MAX_SCALE)

    def grid(self, weight: Tensor) -> Grid:
        groups = split(weight.detach(), self.fmt.group_size)
        # With its sign: a positive extreme has a negative scale, as only -8 has no counterpart.
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = self.storable(extreme / self.fmt.range[0])
        return Grid(torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale))

    def storable(self, scale: Tensor) -> Tensor:
        return scale.clamp(-MAX_SCALE, MAX_SCALE).half().to(scale.dtype)

    def exceeds_scales(self, weight: Tensor) -> bool:
        return float(weight.detach().abs().max()) > -self.fmt.range[0] * self.max_scale

    def round(self, weight: Tensor, grid: Grid) -> Tensor:
        return super().round(split(weight, self.fmt.group_size), grid)

    def fake_quantize(self, weight: Tensor) -> Tensor:
        y: Tensor = _RoundGroups.apply(weight, self)  # type: ignore[no-untyped-call]
        return y

    def pack(self, weight: Tensor, grid: Grid, fmt: LinearFormat) -> IntegerWeight:
        # Without the last group's padding.
        integers = self.round(weight, grid).to(torch.int8).flatten(1)[:, : weight.shape[1]]
        zeros = grid.zero_point
        zero_points = zeros.squeeze(-1).to(torch.int8) if isinstance(zeros, Tensor) else None
        return IntegerWeight(fmt, integers, grid.scale.squeeze(-1), zero_points)


class ZeroPointRounding(GroupRounding):
    """Groups of 4-bit weights (integer - zero point) * scale: the lowest and the highest entry of a
    group have the integers -8 and 7.

    llama.cpp's Q4_1 stores the lowest value in float16, not the zero point: scales have
    `SCALE_BITS` significant bits, so that their product with a zero point is exact there.
    """

    @property
    def max_scale(self) -> float:
        """See `GroupRounding`; a zero point times it is in float16 too."""
        return float(MAX_SCALE / 2**self.fmt.bits)

    def grid(self, weight: Tensor) -> Grid:
        low, high = self.fmt.range
        groups = split(weight.detach(), self.fmt.group_size).float()
        # A group without negative entries begins at zero; one without positive ones ends there.
        lowest, highest = groups.aminmax(dim=-1, keepdim=True)
        lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
        extent = highest - lowest
        scale = self.storable(extent / (high - low))
        # The next lower one where it was rounded up: with it the extremes have -8 and 7.
        lower = self.storable(scale * (1 - 2**-SCALE_BITS))
        scale = torch.where(scale * (high - low) > extent, lower, scale)
        scale = torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)
        # Rounded with the scale that is stored, so that files and training have the same integers.
        zero_point = (low - lowest / scale).round_().clamp_(low, high)
        return Grid(scale.to(weight.dtype), zero_point.to(weight.dtype))

    def storable(self, scale: Tensor) -> Tensor:
        # Of positive floats, rounding the bits to nearest rounds the number.
        bits = scale.float().clamp(max=self.max_scale).view(torch.int32)
        kept = ((bits + (1 << (_DROPPED - 1))) >> _DROPPED) << _DROPPED
        return kept.view(torch.float32).half().to(scale.dtype)


def weight_rounding(fmt: WeightFormat) -> RowRounding:
    """How weights of a format are rounded."""
    if not fmt.group_size:
        return RowRounding(fmt)
    return ZeroPointRounding(fmt) if fmt.zero_points else GroupRounding(fmt)


def fake_quantize_weight(weight: Tensor, fmt: WeightFormat = INT8) -> Tensor:
    """Round a weight (O, I) to its format and back; see `RowRounding.fake_quantize`."""
    return weight_rounding(fmt).fake_quantize(weight)


@torch.no_grad()
def integer_weight(weight: Tensor, fmt: LinearFormat, scale: Tensor | None = None) -> IntegerWeight:
    """Round a weight (O, I) to integers: those of training, of the ONNX graph and of all files.

    Args:
        scale: scale of the whole weight, if `weight` is only a part of it.
    """
    kind = weight_rounding(fmt.weight)
    return kind.pack(weight, kind.grid(weight) if scale is None else Grid(scale), fmt)


def split(x: Tensor, size: int) -> Tensor:
    """(..., I) -> (..., G, size), padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).reshape(*x.shape[:-1], -1, size)


def round_to_levels(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Round x to integers from `low` to `high` times the scale, with straight-through gradients: a
    clipped entry has none."""
    y: Tensor = _RoundToLevels.apply(x, scale, low, high)  # type: ignore[no-untyped-call]
    return y


class _RoundGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: GroupRounding) -> Tensor:
        grid = kind.grid(weight)
        values = kind.round(weight, grid).sub_(grid.zero_point).mul_(grid.scale)
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
