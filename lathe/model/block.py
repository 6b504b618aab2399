"""The Transformer blocks of a model, as its architecture describes them.

Shapes: B batch, T tokens, C hidden size, H query heads of this layer, G key-value heads, each with
n = H / G query heads, D head size, F FFN width, V vocabulary. Module names and arithmetic are those
of Hugging Face's models, but every layer has its own H, G and F, and matrices that read the same
input are fused.

The rows of the fused query, key and value matrix are ordered by key-value heads, each one's n query
heads, key and value together (Megatron-LM's order), so that a slice of rows is a slice of heads.
Those of a gated FFN's first matrix are ordered by channels, each one's gate first.

Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) are those of Hugging Face's Llama:
feature i of a query or key is rotated with feature i + n / 2 of the n rotated ones. Angles, cosines
and sines are float32.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from lathe.model.architecture import Linear, Rope
from lathe.model.config import GPTConfig

Mask = Tensor | tuple[int, ...]
"""What queries may attend to: (B, 1, T, S) True where they may; or the sizes of the documents in
the rows, row by row: attention is causal within each document."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of every token, (T, n_rotated) or (B, 1, T, n_rotated)."""

MIN_TABLE_TOKENS = 256

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

_NO_NORM = nn.Identity()


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far, pre-allocated for `size` tokens per row."""

    keys: list[Tensor]  # per layer (B, G, size, D), rotated where positions are rotary
    values: list[Tensor]
    length: int = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer; returns all of them."""
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def reorder(self, index: Tensor) -> None:
        """Replace row i by a copy of row `index[i]`; there may be more rows than before."""
        self.keys = [k.index_select(0, index) for k in self.keys]
        self.values = [v.index_select(0, index) for v in self.values]


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
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        # A ramp between the features that have `beta_fast` and `beta_slow` periods in the original
        # length: feature i has p of them where theta ** (2 i / n) = original / (2 pi p).
        first, last = (
            n * math.log(original / (2 * math.pi * periods)) / (2 * math.log(rope.theta))
            for periods in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, n - 1)
        width = last - first or 0.001  # transformers' way around a division by zero
        share = 1 - ((torch.arange(n // 2).float() - first) / width).clamp(0, 1)
    else:  # llama3: the same, linear in the number of periods
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        periods = original * plain / (2 * math.pi)
        share = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - share) * slow + share * plain  # share: of the unchanged frequency


def rotary_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Rotation:
    """The rotation of `length` tokens from 0; a constant of compiled code (`Engine.compile`)."""
    return _cached_table(rope, head_dim, length, device)


@functools.lru_cache(maxsize=8)
def _cached_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Rotation:
    with torch.inference_mode(False):  # gradients may be wanted of what it rotates
        angles = torch.outer(torch.arange(length).float(), frequencies(rope, head_dim))
        twice = torch.cat((angles, angles), -1)  # for both halves of a head
        cos, sin, factor = twice.cos(), twice.sin(), rope.attention_factor
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return cos.to(device), sin.to(device)


def rotation(
    rope: Rope, head_dim: int, device: torch.device, tokens: range, positions: Tensor | None
) -> Rotation:
    """The rotation of the tokens at `positions` (B, T), below `tokens.stop`, or else at
    `tokens`."""
    # A power of two, so that a growing text needs few tables.
    length = max(MIN_TABLE_TOKENS, 1 << (tokens.stop - 1).bit_length())
    cos, sin = rotary_table(rope, head_dim, length, device)
    if positions is None:
        return cos[tokens.start : tokens.stop], sin[tokens.start : tokens.stop]
    return cos[positions][:, None], sin[positions][:, None]


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate heads (B, H, T, D)."""
    cos, sin = by
    n = cos.shape[-1]
    rotated, kept = x[..., :n].float(), x[..., n:]
    first, second = rotated.chunk(2, dim=-1)
    # (a, b) -> (a cos - b sin, b cos + a sin)
    turned = (rotated * cos + torch.cat((-second, first), -1) * sin).type_as(x)
    return torch.cat((turned, kept), -1) if kept.shape[-1] else turned


class Attention(nn.Module):
    """Causal self-attention with `n_head` heads, to all tokens or within a sliding window; `n_head
    * head_dim` may differ from C.

    Attributes:
        prefix: keys and values (2, G, p, D) of the model's prefix, which every query attends to, or
            None.
        cached_key, cached_value: what a key or value becomes before it enters a cache: fake
            quantization rounds it.
    """

    prefix: Tensor | None

    def __init__(self, config: GPTConfig, layer: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.n_head, self.head_dim = layer, config.n_head[layer], config.head_dim
        self.per_group = self.n_head // config.n_kv_head[layer]
        self.rope, self.window = config.kinds[layer].rope, config.kinds[layer].window
        self.scale = config.score_scale
        self.names = [_add_linear(self, config, layer, x) for x in config.unit_linears("heads")]
        self.norms = [name.rpartition(".")[2] for name in config.architecture.head_norms]
        self.norms_whole = config.architecture.norms_whole
        for name, size in zip(self.norms, config.head_norm_sizes(layer), strict=False):
            setattr(self, name, make_norm(config, size))
        shape = 2, config.n_kv_head[layer], config.n_prefix, config.head_dim
        self.register_buffer("prefix", torch.zeros(shape) if config.n_prefix else None)
        self.cached_key: nn.Module = nn.Identity()
        self.cached_value: nn.Module = nn.Identity()
        self.dropout = dropout
        self.recompute_core = False

    @property
    def qkv(self) -> nn.Linear:
        """The linear that computes queries, keys and values."""
        return getattr(self, self.names[0])  # type: ignore[no-any-return]

    @property
    def out(self) -> nn.Linear:
        """The linear that reads the heads."""
        return getattr(self, self.names[1])  # type: ignore[no-any-return]

    @property
    def cached_prefix(self) -> Tensor | None:
        """`prefix` as a cache contains it."""
        if self.prefix is None:
            return None
        return torch.stack((self.cached_key(self.prefix[0]), self.cached_value(self.prefix[1])))

    def forward(
        self,
        x: Tensor,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of x (B, T, C), after the cached tokens if there is a cache."""
        out: Tensor = self.out(self.inner(x, mask, cache, positions))
        return out

    def inner(
        self,
        x: Tensor,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The heads' outputs (B, T, H D), which the second linear reads."""
        # Split the rows (B, T, (H + 2 G) D), group by group, into queries, keys and values.
        n = self.per_group
        rows = self.qkv(x)
        groups = rows.view(*rows.shape[:2], -1, n + 2, self.head_dim)  # (B, T, G, n + 2, D)
        qkv = torch.split(groups, [n, 1, 1], 3)
        if self.norms:  # per head, or over all heads of a token
            normed = []
            for name, part in zip(self.norms, qkv[:2], strict=True):
                norm, rows = getattr(self, name), part.flatten(2) if self.norms_whole else part
                normed.append(norm(rows).view_as(part))
            qkv = *normed, qkv[2]
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv)  # (B, H or G, T, D)
        if self.rope is not None:
            start = cache.length if cache else 0 if self.prefix is None else self.prefix.shape[2]
            tokens = range(start, start + q.shape[2])
            by = rotation(self.rope, self.head_dim, q.device, tokens, positions)
            q, k = rotate(q, by), rotate(k, by)
        k, v = self.cached_key(k), self.cached_value(v)
        # A cache begins with the prefix: `GPT.new_cache`.
        prefix = self.cached_prefix if cache is None else None
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        if self.recompute_core and torch.is_grad_enabled():  # scores (T, T) are not kept
            y = checkpoint(self._core, q, k, v, mask, prefix, use_reentrant=False)
        else:
            y = self._core(q, k, v, mask, prefix)
        heads: Tensor = y.transpose(1, 2).flatten(2)
        return heads

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, prefix: Tensor | None
    ) -> Tensor:
        """The heads' outputs (B, H, T, D) of queries (B, H, T, D), keys and values (B, G, S, D)."""
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, tuple):
            if runs_varlen(v, dropout, prefix):
                return self._varlen(q, k, v, document_bounds(mask, v.device), max(mask))
            # Elsewhere a kernel for each document: it takes no mask, and no time for what a mask
            # would hide. The rows' documents stand one after the other, in the order of `mask`.
            rows = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))  # (1, H, B T, D)
            apart = zip(*(torch.split(x, list(mask), 2) for x in rows), strict=True)
            merged = torch.cat([self._core(q, k, v, None, prefix) for q, k, v in apart], 2)
            return torch.unflatten(merged[0], 1, (len(q), -1)).transpose(0, 1)
        if prefix is not None:
            # Every row, or document, begins with the prefix; a cache has it already.
            first_k, first_v = prefix.type_as(k)[:, None].expand(-1, len(k), -1, -1, -1)
            k, v = torch.cat((first_k, k), 2), torch.cat((first_v, v), 2)
        new, known = q.shape[2], k.shape[2]
        is_local = self.window is not None and known > self.window
        if is_local and mask is None and new == known and runs_varlen(v, dropout, prefix):
            # The kernel skips what is outside the window, which others compute and then mask.
            bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=v.device) * new
            return self._varlen(q, k, v, bounds, new)
        # `is_causal` would align the first query and key: with earlier keys it needs a mask.
        if mask is None and new > 1 and (is_local or new < known):
            mask = torch.ones(new, known, dtype=torch.bool, device=q.device).tril(known - new)
        if is_local:
            assert self.window is not None
            near = torch.ones(new, known, dtype=torch.bool, device=q.device)
            near = near.triu(known - new - self.window + 1)
            mask = near if mask is None else mask & near
        return F.scaled_dot_product_attention(
            *(q, k, v, mask, dropout),
            is_causal=mask is None and new > 1,
            scale=self.scale,
            enable_gqa=self.per_group > 1,
        )

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Attention within each text of all rows, in one kernel: what `_core` computes with a
        kernel for each text, and a mask for a window.

        Args:
            bounds: where each text begins among the tokens of all rows, and where the last one
                ends: (n + 1,) int32.
            longest: tokens of the longest text.
        """
        from torch.nn.attention.varlen import varlen_attn  # registers operators when imported

        rows = len(q)
        q, k, v = (x.to(v.dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, H, D)
        y = varlen_attn(
            *(q, k, v, bounds, bounds, longest, longest),
            scale=self.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),  # causal: 0 after
            enable_gqa=self.per_group > 1,
        )
        assert isinstance(y, Tensor)
        return torch.unflatten(y, 0, (rows, -1)).transpose(1, 2)


def runs_varlen(v: Tensor, dropout: float, prefix: Tensor | None) -> bool:
    """Whether FlashAttention's kernel for texts of any lengths, and for windows, takes such values:
    in half precision, from Ampere on, without dropout or a prefix."""
    if not v.is_cuda or dropout or prefix is not None:
        return False
    fits = v.dtype in (torch.float16, torch.bfloat16) and v.shape[-1] in range(8, 257, 8)
    return fits and torch.cuda.get_device_capability(v.device) >= (8, 0)


@functools.lru_cache(maxsize=64)  # all layers share it, also when a backward pass recomputes them
def document_bounds(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each document begins among the tokens of all, and where the last one ends: (n + 1,)
    int32."""
    # From pinned memory the copy does not wait for the kernels that are queued.
    bounds = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    return bounds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else bounds


def attention_kernels(model: nn.Module, dtype: torch.dtype, length: int) -> list[str]:
    """The kernels that torch chooses for a model's attention to `length` tokens, in training."""
    chosen, device = dict[str, None](), next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, Attention):
            groups = module.n_head // module.per_group
            q, k, v = (
                torch.empty(1, n, length, module.head_dim, dtype=dtype, device=device)
                for n in (module.n_head, groups, groups)
            )
            is_local = module.window is not None and length > module.window
            if is_local and runs_varlen(v, module.dropout, module.cached_prefix):
                chosen["flash attention, within the window"] = None
                continue
            mask = torch.ones(length, length, dtype=torch.bool, device=device) if is_local else None
            # The function by which scaled_dot_product_attention chooses; it has no public name.
            choice = torch._fused_sdp_choice(
                *(q.requires_grad_(), k, v, mask, module.dropout, not is_local),
                scale=module.scale,
                enable_gqa=module.per_group > 1,
            )
            chosen[SDPBackend(choice).name.lower().replace("_", " ")] = None
    return [*chosen]


class MLP(nn.Module):
    """The feed-forward layer of a block."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.names = [_add_linear(self, config, layer, x) for x in config.unit_linears("channels")]
        self.activate = ACTIVATIONS[config.architecture.activation]
        self.gated = config.architecture.gated

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        out: Tensor = getattr(self, self.names[1])(self.inner(x))
        return out

    def inner(self, x: Tensor) -> Tensor:
        """The channels (B, T, F), which the second linear reads."""
        rows: Tensor = getattr(self, self.names[0])(x)
        if self.gated:
            gate, up = rows.view(*rows.shape[:2], -1, 2).unbind(3)
            return self.activate(gate) * up
        return self.activate(rows)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm with an offset that is added to its stored weight."""

    def __init__(self, size: int, epsilon: float, offset: float) -> None:
        super().__init__(size, epsilon)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        return F.rms_norm(x, self.normalized_shape, self.offset + self.weight, self.eps)


def make_norm(config: GPTConfig, size: int) -> nn.Module:
    """A norm of the family's kind."""
    family, epsilon = config.architecture, config.layer_norm_epsilon
    if family.norm == "layer_norm":
        return nn.LayerNorm(size, epsilon)
    if family.norm_offset:
        return OffsetRMSNorm(size, epsilon, family.norm_offset)
    return nn.RMSNorm(size, epsilon)


def _add_linear(module: nn.Module, config: GPTConfig, layer: int, linear: Linear) -> str:
    """Add a block's linear to the module that it belongs to; returns its name there."""
    n_in, n_out = config.linear_shape(linear, layer)
    name = linear.name.rpartition(".")[2]
    setattr(module, name, nn.Linear(n_in, n_out, bias=linear.name in config.biased))
    return name


class Half(NamedTuple):
    """A residual branch of a block: it adds `output_norm(part(norm(x)))` to the hidden state."""

    norm: nn.Module
    part: Attention | MLP
    output_norm: nn.Module


class Block(nn.Module):
    """A Transformer block: attention and an FFN, each a residual branch with norms before it, after
    it, or both. The FFN reads attention's output or, if `is_parallel`, the same input as
    attention."""

    def __init__(
        self, config: GPTConfig, layer: int, hidden_dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        family = config.architecture
        attn, mlp = (x.name.partition(".")[0] for x in family.linears if x.style == "column")
        self.names, self.is_parallel = (attn, mlp), family.is_parallel
        self.norms = family.block_norms or ("", "")
        self.output_norms = family.output_norms or ("", "")
        parts = (Attention(config, layer, attention_dropout), MLP(config, layer))
        for norm, name, part in zip(self.norms, self.names, parts, strict=True):
            if norm:
                setattr(self, norm, make_norm(config, config.n_embd))
            setattr(self, name, part)
        for norm in family.output_norms:
            setattr(self, norm, make_norm(config, config.n_embd))
        self.drop = nn.Dropout(hidden_dropout)
        self.recompute_attn = False

    @property
    def attention(self) -> Attention:
        """The self-attention of the block."""
        return getattr(self, self.names[0])  # type: ignore[no-any-return]

    @property
    def halves(self) -> tuple[Half, Half]:
        """The two residual branches."""

        def norm(name: str) -> nn.Module:
            return getattr(self, name) if name else _NO_NORM

        first, second = (
            Half(norm(before), getattr(self, part), norm(after))
            for before, part, after in zip(self.norms, self.names, self.output_norms, strict=True)
        )
        return first, second

    def forward(
        self,
        x: Tensor,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.recompute_attn and torch.is_grad_enabled():
            attended = checkpoint(self._attend, x, mask, cache, positions, use_reentrant=False)
        else:
            attended = self._attend(x, mask, cache, positions)
        norm, mlp, output_norm = self.halves[1]
        between = x + self.drop(attended)
        mlp_output = output_norm(mlp(norm(x if self.is_parallel else between)))
        out: Tensor = between + self.drop(mlp_output)
        return out

    def _attend(
        self, x: Tensor, mask: Mask | None, cache: KVCache | None, positions: Tensor | None
    ) -> Tensor:
        norm, attention, output_norm = self.halves[0]
        out: Tensor = output_norm(attention(norm(x), mask, cache, positions))
        return out
