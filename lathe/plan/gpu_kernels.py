"""Replaces CPU kernels by GPU kernels that keep other tensors for the backward pass.

A trial's fake tensors are on the CPU (see `lathe.plan.rank` for the reason), and torch chooses
kernels by device: attention with dropout materializes its scores, dropout keeps a float mask,
RMSNorm is not fused, and autocast leaves norms in half precision.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Make `torch.nn.functional` call the kernels that a CUDA device would run.

    A TorchFunctionMode would not do: it is off while the backward pass recomputes activations.
    """
    originals = {name: getattr(F, name) for name in REPLACED}
    try:
        for name, function in REPLACED.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(F, name, function)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention in half precision, memory-efficient attention in float32 or with a mask; only
    FlashAttention does not expand shared keys and values."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.dtype != torch.float32 and mask is None:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout, is_causal, scale=scale
        )[0]
        return out
    if enable_gqa and q.shape[1] != k.shape[1]:
        per_group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.expand(*q.shape[:2], *mask.shape[-2:])
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, q.requires_grad, dropout, is_causal, scale=scale
    )[0]
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    input, weight, bias = _wide(input, weight, bias)
    return torch.layer_norm(input, normalized_shape, weight, bias, eps)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    input, weight = _wide(input, weight)
    out: Tensor = torch._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return out


def _wide(*tensors: Tensor | None) -> Any:
    """In float32 under autocast, as on CUDA; on a CPU autocast does not."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(None if x is None else x.float() for x in tensors)


REPLACED: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
