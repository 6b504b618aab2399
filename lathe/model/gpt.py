"""A GPT-2/3 language model: pre-LN blocks, tanh GELU, learned positions, tied head.

Shapes: B batch, T tokens, C hidden size, H heads of this layer, D head size, F FFN width, V
vocabulary. Module names and arithmetic are those of HF's `GPT2LMHeadModel`, but every layer has its
own H and F.

The rows of `c_attn` are ordered head by head, each head's q, k and v together (Megatron-LM's
order), so that a slice of rows is a slice of heads. HF's order, all of q first, is used in files
only.
"""

import zlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lathe.model.config import GPTConfig

Recompute = Literal["full", "full_attn", "core_attn"]


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far, pre-allocated for `size` tokens per row."""

    keys: list[Tensor]  # per layer (B, H, size, D)
    values: list[Tensor]
    length: int = 0

    @classmethod
    def allocate(cls, model: "GPT", batch: int, size: int) -> "KVCache":
        """An empty cache for `batch` rows of up to `size` tokens, on the model's device."""
        c, like = model.config, model.wte.weight
        shapes = [(batch, h, size, c.head_dim) for h in c.n_head]
        return cls([like.new_zeros(s) for s in shapes], [like.new_zeros(s) for s in shapes])

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer; returns all of them."""
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def reorder(self, index: Tensor) -> None:
        """Row i becomes a copy of row `index[i]`; there may be more rows than before."""
        self.keys = [k.index_select(0, index) for k in self.keys]
        self.values = [v.index_select(0, index) for v in self.values]


class Embedding(nn.Embedding):
    """Token embedding; its table is also the head."""

    def table(self) -> Tensor:
        """The matrix (V, C) that lookups and the head use."""
        return self.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T)."""
        return F.embedding(tokens, self.table())


class Attention(nn.Module):
    """Causal self-attention over `n_head` heads; `n_head * head_dim` may be smaller than C."""

    def __init__(self, config: GPTConfig, layer: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.n_head, self.head_dim = layer, config.n_head[layer], config.head_dim
        width = self.n_head * self.head_dim
        self.c_attn = nn.Linear(config.n_embd, 3 * width)
        self.c_proj = nn.Linear(width, config.n_embd)
        self.dropout = dropout
        self.recompute_core = False

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Self-attention of x (B, T, C), after the cached tokens if there is a cache."""
        rows: Tensor = self.c_attn(x)
        qkv = rows.view(*rows.shape[:2], -1, 3, self.head_dim)  # (B, T, H, 3, D)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        if self.recompute_core and torch.is_grad_enabled():
            y = checkpoint(self._core, q, k, v, mask, use_reentrant=False)
        else:
            y = self._core(q, k, v, mask)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)


class MLP(nn.Module):
    """The feed-forward layer of a block."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner[layer])
        self.c_proj = nn.Linear(config.n_inner[layer], config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(
        self, config: GPTConfig, layer: int, hidden_dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer, attention_dropout)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, layer)
        self.drop = nn.Dropout(hidden_dropout)
        self.recompute_attn = False

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.recompute_attn and torch.is_grad_enabled():
            attended = checkpoint(self._attend, x, mask, cache, use_reentrant=False)
        else:
            attended = self._attend(x, mask, cache)
        x = x + self.drop(attended)
        out: Tensor = x + self.drop(self.mlp(self.ln_2(x)))
        return out

    def _attend(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        return self.attn(self.ln_1(x), mask, cache)  # type: ignore[no-any-return]


def initial_weight(
    name: str, shape: torch.Size, config: GPTConfig, std: float, seed: int, scale_residual: bool
) -> Tensor:
    """Initial value of the parameter `name`, the same for every division over processes.

    N(0, std) weights, zero biases; `scale_residual` divides the std of the projections into the
    residual stream by sqrt(2 * layers), as Megatron and GPT-2 do.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if config.architecture.is_norm(name):
        return torch.ones(shape)
    linear = config.architecture.linear_of(name)
    if scale_residual and linear is not None and linear.style == "row":
        std /= (2 * config.n_layer) ** 0.5
    of_its_own = zlib.crc32(f"{seed} {name}".encode())
    return torch.normal(0.0, std, shape, generator=torch.Generator().manual_seed(of_its_own))


class GPT(nn.Module):
    """The whole model. `model(tokens)` gives logits; `hidden` and `head` are its two halves, so
    that a caller who needs few logits need not compute all."""

    def __init__(
        self, config: GPTConfig, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(hidden_dropout)
        self.h = nn.ModuleList(
            Block(config, i, hidden_dropout, attention_dropout) for i in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.head_input: nn.Module | None = None
        self.recompute: Recompute | None = None

    def initialize(self, std: float, seed: int, scale_residual: bool = False) -> None:
        """Fill every parameter with its `initial_weight`."""
        for name, parameter in self.named_parameters():
            value = initial_weight(name, parameter.shape, self.config, std, seed, scale_residual)
            parameter.data.copy_(value)

    def set_recompute(self, granularity: Recompute | None) -> None:
        """Trade compute for memory: keep no activations of the named part between passes."""
        self.recompute = granularity
        for block in self.h:
            assert isinstance(block, Block)
            block.recompute_attn = granularity == "full_attn"
            block.attn.recompute_core = granularity == "core_attn"

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Final hidden states.

        Args:
            tokens: (B, T) ids.
            positions: (B, T); by default they continue after the cached tokens.
            mask: (B, 1, T, S) True where a query may attend, S = cached + T; the default is causal.
                Required when more than one token follows a filled cache.
            cache: filled with the new keys and values.

        Returns:
            (B, T, C) after the last LayerNorm.

        Raises:
            ValueError: more than `n_positions` tokens.
        """
        x = self.embed(tokens, positions, cache.length if cache else 0)
        out: Tensor = self.ln_f(self.transform(x, mask, cache))
        return out

    def embed(self, tokens: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """(B, T) ids -> (B, T, C), the input of the first block; positions count from `start`."""
        T = tokens.shape[1]
        if start + T > self.config.n_positions:
            raise ValueError(f"{start + T} tokens exceed n_positions {self.config.n_positions}")
        if positions is None:
            positions = torch.arange(start, start + T, device=tokens.device)[None]
        out: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return out

    def transform(
        self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """All blocks, (B, T, C) -> (B, T, C)."""
        T = x.shape[1]
        for block in self.h:
            if self.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, cache, use_reentrant=False)
            else:
                x = block(x, mask, cache)
        if cache is not None:
            cache.length += T
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C) through the tied embedding."""
        if self.head_input is not None:
            hidden = self.head_input(hidden)
        return F.linear(hidden, self.wte.table())

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        return self.head(self.hidden(tokens))
