"""Matrix products of the blocks' linears in 8-bit floating point (fp8), which Hopper and newer GPUs
compute twice as fast as in 16 bits.

Inputs and weights are rounded to e4m3, with 3 bits of mantissa, gradients to e5m2, with 2 and a
wider range; each tensor has one scale, from its own largest magnitude. Sums are in float32. All
else, the weights' updates and the head included, is as without.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433); scales as in
torchao's recipe "tensorwise" (github.com/pytorch/ao, torchao/float8).

Shapes: N tokens, I inputs and O outputs of a linear.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.model.fake_quant import FakeQuantLinear, replace_module
from lathe.model.gpt import GPT
from lathe.model.lora import LoraLinear
from lathe.train.layout import Layout
from lathe.train.loss import compute_dtypes
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Sizes of a product in fp8 are multiples of it: cuBLAS's and `torch._scaled_mm`'s requirement."""
CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with fp8: Ada, then Hopper."""


class Float8Linear(nn.Linear):
    """`nn.Linear` with the weight and bias of another, whose three products are in fp8."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the dtype of 16-bit products."""
        dtype, _ = compute_dtypes(x)
        rows = x.flatten(0, -2).to(dtype)
        # Rows of zeros fill up a short batch, as the last one of a validation.
        missing = -len(rows) % MULTIPLE
        y: Tensor = _Product.apply(F.pad(rows, (0, 0, 0, missing)), self.weight.to(dtype))  # type: ignore[no-untyped-call]
        y = y[: len(rows)].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x (N, I), weight (O, I) -> (N, O)."""
        (x8, x_scale), (w8, w_scale) = _rounded(x, E4M3), _rounded(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtype = x.dtype
        # Sums in fewer bits, as torchao has it: in the forward pass only.
        return torch._scaled_mm(
            x8, w8.t(), x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = _rounded(grad, E5M2)
        # The first factor of a product in fp8 has to be in row-major order, the second one in
        # column-major order: so `t().contiguous().t()`.
        grad_x = torch._scaled_mm(
            g8, w8.t().contiguous().t(), g_scale, w_scale, out_dtype=ctx.dtype
        )
        g8 = g8.t().contiguous()
        grad_weight = torch._scaled_mm(
            g8, x8.t().contiguous().t(), g_scale, x_scale, out_dtype=ctx.dtype
        )
        return grad_x, grad_weight


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in `dtype`, contiguous, and the scale () float32 with which it uses its range."""
    limit = torch.finfo(dtype).max
    largest = x.abs().amax().float()
    scale = torch.where(largest > 0, largest, 1.0) / limit
    return (x.float() / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


def insert(model: GPT) -> None:
    """Replace the blocks' linears by `Float8Linear`, in place, except those whose sizes are no
    multiple of `MULTIPLE`."""
    for name, module in list(model.named_modules()):
        sizes = (module.in_features, module.out_features) if type(module) is nn.Linear else (1,)
        if not any(size % MULTIPLE for size in sizes):
            assert isinstance(module, nn.Linear)
            replace_module(model, name, Float8Linear(module))


def require_float8(model: GPT, recipe: Recipe, layout: Layout, device: torch.device) -> None:
    """Raise UserError if the recipe's training cannot be in fp8."""
    key = "Engine.mix_precision.fp8"
    if recipe.Engine.mix_precision.dtype != "bfloat16":
        raise UserError(
            f"{key} with Engine.mix_precision.dtype {recipe.Engine.mix_precision.dtype}",
            "set Engine.mix_precision.dtype=bfloat16, in which all else is computed",
            Code.CONFLICTING_OPTIONS,
        )
    if layout.mp > 1:
        raise UserError(
            f"{key} with Distributed.mp_degree {layout.mp}", "use sharding", Code.UNSUPPORTED
        )
    for module in model.modules():
        if isinstance(module, FakeQuantLinear | LoraLinear):
            what = "LoRA" if isinstance(module, LoraLinear) else "quantization-aware training"
            raise UserError(
                f"{key} cannot be combined with {what}",
                f"-o {key}=False",
                Code.CONFLICTING_OPTIONS,
            )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            f"{key}: {torch.cuda.get_device_name(device)} has no fp8",
            f"-o {key}=False",
            Code.UNSUPPORTED,
        )
