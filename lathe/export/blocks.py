"""The nodes of a block that differ from family to family: norms, attention, activations."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from lathe.export.attention import Heads, attention_node
from lathe.model.rotary import rotation

if TYPE_CHECKING:
    from lathe.export.graph import Graph

RMS_OPSET = 23
"""The first with RMSNormalization."""


def norm(g: "Graph", name: str, x: str) -> str:
    """The norm `name` of the last axis of x."""
    weight = g.weight(f"{name}.weight")
    if g.config.architecture.norm == "rms_norm":
        return g.op("RMSNormalization", x, weight, name=name, axis=-1, epsilon=g.epsilon)
    bias = g.weight(f"{name}.bias")
    return g.op("LayerNormalization", x, weight, bias, name=name, axis=-1, epsilon=g.epsilon)


def attention(g: "Graph", layer: int, x: str) -> str:
    """Causal self-attention of x (B, T, C) over the cache, before the linear that reads it."""
    config, family = g.config, g.config.architecture
    name = f"{family.block(layer)}.{family.column('heads').name}"
    qkv = g.linear(name, x)
    if family.head_norms:
        qkv = _with_normed_heads(g, layer, qkv)
    output = name.rpartition(".")[0]
    heads = Heads(config.n_head[layer], config.n_kv_head[layer], _rotary_caches(g))
    g.nodes.append(attention_node(layer, qkv, heads, output, g.dtype))
    g.declare(output, "batch", "length", config.widths_of(layer)["heads"])
    return output


def activated(g: "Graph", rows: str) -> str:
    """The FFN channels of the rows (B, T, F), or of gates and their factors (B, T, 2 F)."""
    if not g.config.architecture.gated:
        return _activation(g, rows)
    gate, up = g.ops("Split", 2, rows, axis=-1, num_outputs=2)
    return g.op("Mul", _activation(g, gate), up)


def _activation(g: "Graph", x: str) -> str:
    if g.config.architecture.activation == "silu":
        return g.op("Mul", x, g.op("Sigmoid", x))
    return g.op("Gelu", x, approximate="tanh")


def _with_normed_heads(g: "Graph", layer: int, qkv: str) -> str:
    """Queries, keys and values (B, T, (H + 2 G) D), the queries and keys of every head normed."""
    config = g.config
    widths, D = config.widths_of(layer), config.head_dim
    sizes = np.array([widths["heads"], widths["kv_heads"], widths["kv_heads"]])
    split = g.constant(f"qkv_sizes_{'_'.join(map(str, sizes))}", sizes)
    parts = g.ops("Split", 3, qkv, split, axis=-1)
    apart = g.constant("heads_apart", np.array([0, 0, -1, D]))
    for k, name in enumerate(config.architecture.head_norms):
        heads = g.op("Reshape", parts[k], apart)
        normed = norm(g, f"{config.architecture.block(layer)}.{name}", heads)
        together = g.constant(f"together_{sizes[k]}", np.array([0, 0, sizes[k]]))
        parts[k] = g.op("Reshape", normed, together)
    return g.op("Concat", *parts, axis=-1)


def _rotary_caches(g: "Graph") -> tuple[str, ...]:
    """Names of the cosines and sines (positions, n_rotated / 2) of the prefix and the longest text,
    none without rotary positions."""
    config = g.config
    if config.rope is None:
        return ()
    tokens = range(config.n_prefix + config.n_positions)
    found = rotation(config.rope, config.head_dim, torch.device("cpu"), tokens, None)
    half = config.rope.n_rotated(config.head_dim) // 2  # the other half is the same
    arrays = (part[:, :half].numpy().astype(g.weights_type) for part in found)
    names = ("cosines", "sines")
    return tuple(g.constant(name, array) for name, array in zip(names, arrays, strict=True))
