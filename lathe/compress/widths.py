"""Rank and remove whole heads and FFN channels; what is left is a smaller dense GPT.

Scores and targets are those of PaddleFleetX's `Prune`: the mean magnitude of a head's rows in the
fused qkv weight, and of a channel's row in the first FFN weight. Hidden size and embeddings stay.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lathe.model.gpt import GPT, Block

Criterion = Literal["l1_norm", "l2_norm"]


@dataclass(frozen=True)
class Kept:
    """Indexes of one layer's surviving heads and FFN channels, ascending."""

    heads: Tensor
    channels: Tensor


def choose_uniform(model: GPT, criterion: Criterion, ratio: float) -> list[Kept]:
    """Drop the lowest `round(n * ratio)` heads and channels of every layer, never all of them."""
    kept = []
    for block in model.h:
        assert isinstance(block, Block)
        heads = _largest(head_scores(block, criterion), ratio)
        kept.append(Kept(heads, _largest(channel_scores(block, criterion), ratio)))
    return kept


def head_scores(block: Block, criterion: Criterion) -> Tensor:
    """(H,) mean |w| (l1) or root mean w^2 (l2) of each head's q, k and v rows."""
    rows = block.attn.c_attn.weight.detach().view(block.attn.n_head, -1)
    return _norm(rows, criterion)


def channel_scores(block: Block, criterion: Criterion) -> Tensor:
    """(F,) the same of each FFN channel's input row."""
    return _norm(block.mlp.c_fc.weight.detach(), criterion)


def shrink(model: GPT, kept: list[Kept]) -> GPT:
    """A new GPT with only the kept heads and channels; the logits are those of `model` with the
    others' outputs zeroed. Dropout and recompute carry over.

    Raises:
        ValueError: `model` is fake-quantized: prune first, then quantize.
    """
    if model.config.quantization is not None:
        raise ValueError("a quantized model cannot be pruned: prune first, then quantize")
    config = replace(
        model.config,
        n_head=tuple(len(k.heads) for k in kept),
        n_inner=tuple(len(k.channels) for k in kept),
    )
    first = model.h[0]
    assert isinstance(first, Block)
    small = GPT(config, first.drop.p, first.attn.dropout)
    small.set_recompute(model.recompute)
    state = dict(model.state_dict())
    for i, layer in enumerate(kept):
        _keep_outputs(state, f"h.{i}.attn.c_attn", _spans(layer.heads, 3 * config.head_dim))
        _keep_inputs(state, f"h.{i}.attn.c_proj", _spans(layer.heads, config.head_dim))
        _keep_outputs(state, f"h.{i}.mlp.c_fc", layer.channels)
        _keep_inputs(state, f"h.{i}.mlp.c_proj", layer.channels)
    small.load_state_dict(state)
    return small


def _largest(scores: Tensor, ratio: float) -> Tensor:
    keep = max(1, len(scores) - round(len(scores) * ratio))
    return scores.topk(keep).indices.sort().values


def _norm(rows: Tensor, criterion: Criterion) -> Tensor:
    return rows.abs().mean(1) if criterion == "l1_norm" else rows.square().mean(1).sqrt()


def _spans(heads: Tensor, length: int) -> Tensor:
    """Indexes of the heads' rows or columns, `length` of them a head."""
    return (heads[:, None] * length + torch.arange(length)).flatten()


def _keep_outputs(state: dict[str, Tensor], linear: str, index: Tensor) -> None:
    for name in (f"{linear}.weight", f"{linear}.bias"):
        state[name] = state[name][index]


def _keep_inputs(state: dict[str, Tensor], linear: str, index: Tensor) -> None:
    state[f"{linear}.weight"] = state[f"{linear}.weight"][:, index]
