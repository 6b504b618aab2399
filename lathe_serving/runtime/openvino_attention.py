"""Attention in OpenVINO's operators: rotary positions, and attention over a paged cache."""

from collections.abc import Sequence

import numpy as np
from openvino import Output, op
from openvino import opset15 as ops


def paged_attention(
    parts: Sequence[Output],
    caches: Sequence[Output],
    layout: Sequence[Output],
    longest: Output,
    shape: tuple[int, int],
    scale: float,
    window: int,
) -> Output:
    """Causal self-attention over packed sequences; appends their keys and values to the caches.

    Args:
        parts: queries, keys and values (N, heads * head_dim) of all new tokens.
        caches: of keys and of values (blocks, n_kv_head, BLOCK, head_dim).
        layout: int32 (sequences,), tokens that each sequence has; (sequences + 1,), where its new
            ones begin; (used blocks,), their numbers; (sequences + 1,), where a sequence's begin.
        longest: tokens of the longest sequence, with the new ones.
        shape: n_kv_head and head_dim.
        scale: factor of attention scores.
        window: number of tokens that a query attends to; 0: all.

    Returns:
        (N, n_head * head_dim).
    """
    n_kv_head, head_dim = shape
    numbers = (ops.constant(x).output(0) for x in (np.float32(scale), np.int32(window)))
    no_slopes = _none(np.float32, 0)
    given = [*parts, *caches, *layout, *numbers, no_slopes, longest]
    # Not public: OpenVINO makes it itself of a model with a state, whose layout cannot be chosen.
    paged = op._PagedAttentionExtension([*given, *_unused()])
    for part in ("k", "v"):
        paged.get_rt_info()[f"num_{part}_heads"] = n_kv_head
        paged.get_rt_info()[f"{part}_head_size"] = head_dim
    width = parts[0].get_partial_shape()[1].get_length()
    return ops.reshape(paged.output(0), np.array([0, width]), True).output(0)


def rotated(x: Output, head_dim: int, cosines: Output, sines: Output) -> Output:
    """Queries or keys (..., heads, head_dim), the first features of every head rotated by angles
    (..., 1, half)."""
    half = cosines.get_partial_shape()[-1].get_length()
    sizes = np.array([half, half, head_dim - 2 * half])
    first, second, *rest = ops.variadic_split(
        x, np.int64(-1), sizes if sizes[2] else sizes[:2]
    ).outputs()
    turned = [
        ops.subtract(ops.multiply(first, cosines), ops.multiply(second, sines)).output(0),
        ops.add(ops.multiply(second, cosines), ops.multiply(first, sines)).output(0),
    ]
    return ops.concat([*turned, *rest], -1).output(0)


def _unused() -> list[Output]:
    """Unused inputs of paged attention, for cache eviction, rotation and sparsity."""
    empty = [_none(np.int32, 0) for _ in range(3)]
    sparse = [*(_none(np.float32, 0) for _ in range(2)), *(_none(np.int32) for _ in range(2))]
    more = [_none(np.float32, 0, 0, 0, 0), _none(np.int32), *(_none(np.int32, 0) for _ in range(4))]
    return [*empty, *sparse, *more, _none(np.uint8, 0), _none(np.int32, 0)]


def _none(kind: type, *shape: int) -> Output:
    return ops.constant(np.zeros(shape, kind)).output(0)
