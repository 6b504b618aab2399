"""Simulated linears whose weights and activations are quantized in groups of inputs, as
onnxruntime's `MatMulNBits` (accuracy level 4) computes them.

A group of `size` consecutive inputs of an output channel consists of 4-bit integers, from -8 to 7,
or 8-bit ones, from -128 to 127, times one float16 scale. The scale is the entry of largest
magnitude divided by the lowest integer, so that all integers are used (llama.cpp's Q4_0). Training
thus computes with the values of a GGUF or compressed-tensors file. The activations of a token are
rounded to 8 bits in the same groups, each with its largest magnitude / 127 as the scale. If the
number of inputs is not a multiple of the size, the last group is padded with zeros.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.model.quantization import ACTIVATION_LEVELS
from lathe_base.config.settings.types import Bits

SCALE_OF_ZEROS = 1e-8
"""Scale of a group whose own is zero in float16: zeros, or entries below 1e-7. It is small because
the kernel adds and subtracts 8 or 128 times the scale times the inputs, with a float32 rounding
error that grows with the scale."""

MAX_SCALE = torch.finfo(torch.float16).max


def split(x: Tensor, size: int) -> Tensor:
    """(..., n) -> (..., groups, size), padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).reshape(*x.shape[:-1], -1, size)


def integer_range(bits: Bits) -> tuple[int, int]:
    """The lowest and the highest integer of a weight."""
    return int(-(2 ** (bits - 1))), int(2 ** (bits - 1) - 1)


def weight_groups(weight: Tensor, size: int, bits: Bits) -> tuple[Tensor, Tensor]:
    """Integers (out, groups, size) and scales (out, groups, 1) of a weight (out, in)."""
    groups = split(weight, size)
    scale = weight_scales(groups, bits)
    return (groups / scale).round_().clamp_(*integer_range(bits)), scale


def weight_scales(groups: Tensor, bits: Bits) -> Tensor:
    """Scales (out, groups, 1) of a weight's groups (out, groups, size); the largest one of float16
    where theirs exceeds it, so that integers times scales are finite."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    lowest, _ = integer_range(bits)
    scale = (extreme / lowest).clamp(-MAX_SCALE, MAX_SCALE).half().to(groups.dtype)
    return torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)


def exceeds_scales(weight: Tensor, bits: Bits) -> bool:
    """Test whether an entry exceeds the lowest integer times the largest scale."""
    return float(weight.detach().abs().max()) > -integer_range(bits)[0] * MAX_SCALE


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, size: int, bits: Bits) -> Tensor:
        integers, scale = weight_groups(weight, size, bits)
        return integers.mul_(scale).flatten(-2)[:, : weight.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class _RoundActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        groups = split(x, size)
        scale = activation_scales(groups)
        rounded = torch.round(groups / scale).mul_(scale)
        return rounded.flatten(-2)[..., : x.shape[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def activation_scales(groups: Tensor) -> Tensor:
    """Scales (..., groups, 1) of activations (..., groups, size)."""
    absmax = groups.abs().amax(-1, keepdim=True)
    return torch.where(absmax > 0, absmax, torch.ones_like(absmax)) / ACTIVATION_LEVELS


def round_weight(weight: Tensor, size: int, bits: Bits) -> Tensor:
    """Round a weight (out, in) to integers and back, with straight-through gradients."""
    y: Tensor = _RoundWeight.apply(weight, size, bits)  # type: ignore[no-untyped-call]
    return y


def round_activation(x: Tensor, size: int) -> Tensor:
    """Round activations (..., in) to INT8 in groups and back, with straight-through gradients."""
    y: Tensor = _RoundActivation.apply(x, size)  # type: ignore[no-untyped-call]
    return y


class RoundGroups(nn.Module):
    """`round_activation` as a module."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., in)."""
        return round_activation(x, self.size)
