"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) of queries and keys.

As in Hugging Face's Llama, feature i is rotated with feature i + n / 2 of the n rotated ones.
Angles, cosines and sines are float32.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from lathe.model.rope import Rope, RopeScaling

MIN_TABLE_TOKENS = 256


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of every token, (T, n_rotated) or (B, 1, T, n_rotated)."""


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position, (n_rotated / 2,) float32."""
    n = rope.n_rotated(head_dim)
    exponents = torch.arange(0, n, 2, dtype=torch.int64).float() / n
    plain = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return plain
    if scaling.rope_type == "longrope":
        return plain / torch.tensor(scaling.short_factor)
    slow = plain / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    if scaling.rope_type == "yarn":
        share = 1 - _ramp(rope.theta, scaling, n)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        periods = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        share = ((periods - low) / (high - low)).clamp(0, 1)  # of the unchanged frequency
    return (1 - share) * slow + share * plain


def _ramp(theta: float, scaling: RopeScaling, n: int) -> Tensor:
    """From 0 to 1 over the frequencies (n / 2,), between those that have `beta_fast` and
    `beta_slow` periods in the original length."""

    def place(periods: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * periods)
        return n * math.log(wavelength) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n - 1)
    width = last - first or 0.001  # transformers' way around a division by zero
    return ((torch.arange(n // 2).float() - first) / width).clamp(0, 1)


def rotation(
    rope: Rope, head_dim: int, device: torch.device, tokens: range, positions: Tensor | None
) -> Rotation:
    """The rotation of the tokens at `positions` (B, T), below `tokens.stop`, or else at
    `tokens`."""
    # A power of two, so that a growing text needs few tables.
    length = max(MIN_TABLE_TOKENS, 1 << (tokens.stop - 1).bit_length())
    cos, sin = table(rope, head_dim, length, device)
    if positions is None:
        return cos[tokens.start : tokens.stop], sin[tokens.start : tokens.stop]
    return cos[positions][:, None], sin[positions][:, None]


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate heads (B, H, T, D)."""
    cos, sin = by
    n = cos.shape[-1]
    rotated, kept = x[..., :n].float(), x[..., n:]
    first, second = rotated.chunk(2, dim=-1)
    turned = (rotated * cos + torch.cat((-second, first), -1) * sin).type_as(x)
    return torch.cat((turned, kept), -1) if kept.shape[-1] else turned


def table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Rotation:
    """The rotation of `length` tokens from 0; a constant of compiled code (`Engine.compile`)."""
    return _cached_table(rope, head_dim, length, device)


@lru_cache(maxsize=8)
def _cached_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Rotation:
    with torch.inference_mode(False):  # gradients may be wanted of what it rotates
        angles = torch.outer(torch.arange(length).float(), frequencies(rope, head_dim))
        twice = torch.cat((angles, angles), -1)  # for both halves of a head
        cos, sin, factor = twice.cos(), twice.sin(), rope.attention_factor
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return cos.to(device), sin.to(device)
