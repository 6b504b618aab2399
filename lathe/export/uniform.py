"""Pads a model whose layers differ in width to one that transformers and vLLM can represent.

Pruning leaves layers with different numbers of heads and channels, but Hugging Face's classes have
one number for all layers. The narrower layers get heads and channels of zeros, at the end of what
they belong to: key-value heads after the others, query heads after those of their group, channels
after the others. The linear that reads them has zeros in their columns, so that whatever they
compute is multiplied by zero, and the hidden state is the same sum with zeros added. Scales of
quantized weights do not change, as they depend on the largest magnitudes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lathe.model.architecture import HEAD, Linear
from lathe.model.checkpoint import join_rows, split_rows
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.errors import Code, UserError


def uniform(config: GPTConfig, folder: Path) -> GPTConfig:
    """The smallest configuration of equal layers into which the model fits; the model's own if its
    layers are equal.

    Raises:
        UserError: zeros would change what the model computes, or no number of heads fits.
    """
    plan = config.quantization
    # Of the linears that read units; a group of scales has this many of their inputs.
    group_size = (
        max((x.weight.group_size for name, x in plan.linears.items() if name != HEAD), default=0)
        if plan
        else 0
    )
    channels = max(config.n_inner)
    if group_size:  # other engines require whole groups
        channels += -channels % group_size
    kv_heads, per_group = _head_numbers(config, folder)
    n = config.n_layer
    shape = replace(
        config,
        n_head=(kv_heads * per_group,) * n,
        kv_heads=(kv_heads,) * n if config.kv_heads else (),
        n_inner=(channels,) * n,
    )
    has_new_heads = shape.widths("heads") != config.widths("heads")
    if config.architecture.norms_whole and has_new_heads:
        raise UserError(
            f"{folder}: its layers differ in width, and a norm of all heads together would count "
            "the zeros that make them equal",
            "prune with Compress.Prune.scope=uniform",
            Code.UNSUPPORTED,
        )
    # New query heads of a group stand before the next group's, whose scales move with them.
    moves = any(queries < per_group for queries in config.per_group)
    if group_size and moves and config.head_dim % group_size:
        raise UserError(
            f"{folder}: the layers' groups of query heads differ in size, and the heads' size "
            f"{config.head_dim} is not a multiple of the scales' group size {group_size}",
            "quantize with another Compress.Quantization.group_size",
            Code.UNSUPPORTED,
        )
    return shape


def _head_numbers(config: GPTConfig, folder: Path) -> tuple[int, int]:
    """(key-value heads, query heads of each) that hold those of every layer."""
    least_kv, least_queries = max(config.n_kv_head), max(config.per_group)
    whole = config.n_embd // config.head_dim
    for queries in range(least_queries, config.n_embd + 1):
        for kv in range(least_kv, config.n_embd // queries + 1):
            if config.architecture.has_head_dim:
                fits = config.n_embd % (kv * queries) == 0  # as transformers requires
            else:
                fits = kv * queries == whole
            if fits and (config.kv_heads or queries == 1):
                return kv, queries
    raise UserError(
        f"{folder}: transformers has no model of hidden size {config.n_embd} with {least_kv} "
        f"key-value heads, {least_queries} query heads for each",
        "remove compressed-tensors from Export.formats",
        Code.UNSUPPORTED,
    )


@torch.no_grad()
def padded(model: GPT, folder: Path) -> GPT:
    """The same model in the shape of `uniform`; itself if its layers are equal. Only its weights
    are complete, not the observers of activations: their scales are in the plan."""
    before, after = model.config, uniform(model.config, folder)
    if before == after:
        return model
    wide = GPT(after.with_quantization(None)).eval()
    wide.config = after
    for name, parameter in wide.named_parameters():
        tensor: Tensor = model.get_parameter(name)
        linear = before.architecture.find_linear(name)
        if linear is not None and tensor.shape != parameter.shape:
            layer = int(name.removeprefix(f"{before.architecture.blocks}.").partition(".")[0])
            tensor = _with_zeros(tensor, linear, before, after, layer)
        parameter.copy_(tensor)
    return wide


def _with_zeros(
    tensor: Tensor, linear: Linear, before: GPTConfig, after: GPTConfig, layer: int
) -> Tensor:
    """A linear's weight (out, in) or bias (out,), with zeros for the units that were added."""
    groups = [config.groups(linear, layer) for config in (before, after)]
    widths = [config.layer_widths(layer) for config in (before, after)]
    if linear.style == "column":
        sizes = [[width[part] for part in linear.parts] for width in widths]
        parts = split_rows(tensor, groups[0], sizes[0])
        grown = [_grown(x, groups, (a, b)) for x, a, b in zip(parts, *sizes, strict=True)]
        return join_rows(grown, groups[1])
    return _grown(tensor.T, groups, [width[linear.units] for width in widths]).T


def _grown(rows: Tensor, groups: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Rows (groups[0] * n, ...) of equal groups, as rows (groups[1] * m, ...) with the new ones
    zero, where `sizes` are the numbers of rows."""
    (g, new_groups), (size, new_size) = groups, sizes
    old = rows.reshape(g, size // g, *rows.shape[1:])
    new = rows.new_zeros(new_groups, new_size // new_groups, *rows.shape[1:])
    new[:g, : old.shape[1]] = old
    return new.flatten(0, 1)
