"""A language model: embeddings, Transformer blocks, a final norm and a head, as its architecture
describes.

Shapes: B batch, T tokens, C hidden size, V vocabulary. Module names and arithmetic are those of
Hugging Face's models; `lathe.model.block` says what differs within a block.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lathe.model.architecture import HEAD
from lathe.model.block import Block, KVCache, Mask, make_norm
from lathe.model.config import GPTConfig
from lathe_base.config.settings.types import Recompute


class Embedding(nn.Embedding):
    """An embedding table, also used for the head."""

    def reset_parameters(self) -> None:
        """Draw random weights, except on the meta device, where torch 2.13 would import
        torch._dynamo, which takes a second and 60 MB."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def table(self) -> Tensor:
        """The matrix (V, C) that lookups, or the head, use."""
        return self.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T)."""
        return F.embedding(tokens, self.table())


def initial_weight(
    name: str, shape: torch.Size, config: GPTConfig, std: float, seed: int, scale_residual: bool
) -> Tensor:
    """Initial value of the parameter `name`, independent of the parallel layout.

    N(0, std) weights, zero biases; `scale_residual` divides the std of the projections into the
    residual stream by sqrt(2 * layers), as Megatron and GPT-2 do.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if config.architecture.is_norm(name):
        return torch.full(shape, 1.0 - config.architecture.norm_offset)
    linear = config.architecture.find_linear(name)
    if scale_residual and linear is not None and linear.style == "row":
        std /= (2 * config.n_layer) ** 0.5
    # A seed for each name: a rank that has only some of the parameters draws the same values.
    parameter_seed = zlib.crc32(f"{seed} {name}".encode())
    return torch.normal(0.0, std, shape, generator=torch.Generator().manual_seed(parameter_seed))


class GPT(nn.Module):
    """The whole model. `model(tokens)` gives logits; `hidden` and `head` are its two halves, so
    that callers can compute only the logits they need."""

    def __init__(
        self, config: GPTConfig, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        family, C = config.architecture, config.n_embd
        setattr(self, family.embeddings[0], Embedding(config.vocab_size, C))
        for name in family.embeddings[1:]:
            setattr(self, name, Embedding(config.n_position_rows, C))
        self.drop = nn.Dropout(hidden_dropout)
        blocks = (
            Block(config, i, hidden_dropout, attention_dropout) for i in range(config.n_layer)
        )
        setattr(self, family.blocks, nn.ModuleList(blocks))
        setattr(self, family.final_norm, make_norm(config, C))
        if not config.tie_word_embeddings:
            setattr(self, HEAD, Embedding(config.vocab_size, C))
        self.head_input: nn.Module | None = None
        self.recompute: Recompute | None = None

    @property
    def embedding(self) -> Embedding:
        """The token embedding."""
        return getattr(self, self.config.architecture.embeddings[0])  # type: ignore[no-any-return]

    @property
    def output(self) -> Embedding:
        """The head's table, the token embedding where they are tied."""
        return self.embedding if self.config.tie_word_embeddings else getattr(self, HEAD)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return getattr(self, self.config.architecture.blocks)  # type: ignore[no-any-return]

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        return getattr(self, self.config.architecture.final_norm)  # type: ignore[no-any-return]

    @property
    def prefix(self) -> Sequence[Tensor]:
        """Keys and values (2, G, p, D) of the prefix in every layer, as a cache has them; empty
        without one."""
        blocks = (block for block in self.blocks if isinstance(block, Block))
        prefixes = (block.attention.cached_prefix for block in blocks)
        return [keys_values for keys_values in prefixes if keys_values is not None]

    @torch.no_grad()
    def set_prefix(self, tokens: Sequence[int]) -> None:
        """Put `tokens` before every text, replacing any earlier prefix: their keys and values, as
        the model computes them now, become constants, and the maximum length shrinks accordingly.
        """
        whole = self.config.n_prefix + self.config.n_positions
        attentions = [block.attention for block in self.blocks if isinstance(block, Block)]
        for attention in attentions:
            attention.prefix = None
        self.config = replace(self.config, n_positions=whole, prefix_tokens=())
        if not tokens:
            return
        # The prefix is a text read into a cache; what the cache then has is kept.
        cache = self.new_cache(1, len(tokens))
        self.eval().hidden(torch.tensor([tokens], device=self.embedding.weight.device), cache=cache)
        for attention, keys, values in zip(attentions, cache.keys, cache.values, strict=True):
            attention.prefix = torch.cat((keys, values))
        n_positions = whole - len(tokens)
        self.config = replace(self.config, n_positions=n_positions, prefix_tokens=tuple(tokens))

    def initialize(self, std: float, seed: int, scale_residual: bool = False) -> None:
        """Fill every parameter with its `initial_weight`."""
        for name, parameter in self.named_parameters():
            value = initial_weight(name, parameter.shape, self.config, std, seed, scale_residual)
            parameter.data.copy_(value)

    def set_recompute(self, granularity: Recompute | None) -> None:
        """Trade compute for memory: recompute the activations of the named part in the backward
        pass."""
        self.recompute = granularity
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute_attn = granularity == "full_attn"
            block.attention.recompute_core = granularity == "core_attn"

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Final hidden states.

        Args:
            tokens: (B, T) ids.
            positions: (B, T), counted from the start of the prefix; by default they continue after
                the prefix or the cached tokens.
            mask: see `lathe.model.block.Mask`, S = cached + T; the default is causal.
            cache: filled with the new keys and values.

        Returns:
            (B, T, C) after the last norm.

        Raises:
            ValueError: more than `n_positions` tokens.
        """
        x = self.embed(tokens, positions, cache.length if cache else None)
        out: Tensor = self.final_norm(self.transform(x, mask, cache, positions))
        return out

    def embed(
        self, tokens: Tensor, positions: Tensor | None = None, start: int | None = None
    ) -> Tensor:
        """(B, T) ids -> (B, T, C), the input of the first block; positions count from `start`, by
        default the end of the prefix."""
        T, n_prefix = tokens.shape[1], self.config.n_prefix
        start = n_prefix if start is None else start
        if (length := start - n_prefix + T) > self.config.n_positions:
            raise ValueError(f"{length} tokens exceed n_positions {self.config.n_positions}")
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        for name in self.config.architecture.embeddings[1:]:
            if positions is None:
                positions = torch.arange(start, start + T, device=tokens.device)[None]
            x = x + getattr(self, name)(self.config.architecture.position_offset + positions)
        out: Tensor = self.drop(x)
        return out

    def transform(
        self,
        x: Tensor,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """All blocks, (B, T, C) -> (B, T, C)."""
        T = x.shape[1]  # `length` grows when all layers have appended
        for block in self.blocks:
            if self.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, cache, positions, use_reentrant=False)
            else:
                x = block(x, mask, cache, positions)
        if cache is not None:
            cache.length += T
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C)."""
        if self.head_input is not None:
            hidden = self.head_input(hidden)
        return F.linear(hidden, self.output.table())  # the same matrix as the lookup's if tied

    def new_cache(self, batch: int, size: int) -> KVCache:
        """A cache for `batch` rows of up to `size` tokens after the model's prefix, on the model's
        device."""
        c, like = self.config, self.embedding.weight
        shapes = [(batch, g, c.n_prefix + size, c.head_dim) for g in c.n_kv_head]
        cache = KVCache([like.new_zeros(s) for s in shapes], [like.new_zeros(s) for s in shapes])
        if c.n_prefix:
            for layer, keys_values in enumerate(self.prefix):
                cache.append(layer, *keys_values[:, None])  # the same for every row
            cache.length = c.n_prefix
        return cache

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        return self.head(self.hidden(tokens))
