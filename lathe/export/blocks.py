"""The nodes of a block that differ from family to family: norms, attention, activations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from lathe.export.attention import Heads, attention_node
from lathe.model.config import GPTConfig
from lathe.model.rope import Rope
from lathe.model.rotary import frequencies

if TYPE_CHECKING:
    from lathe.export.graph import Graph

RMS_OPSET = 23
"""The first opset with RMSNormalization."""
HEAD_MULTIPLE = 8
"""onnxruntime's GroupQueryAttention supports head sizes that are a multiple of this,"""
ROTARY_MULTIPLE = 16
"""and, if it rotates queries and keys, head sizes and rotated parts that are a multiple of this."""


@dataclass(frozen=True)
class PaddedHead:
    """A head in the graph's attention: features and zeros.

    Attributes:
        size: including the zeros.
        features: index of the model's feature at each place, -1 for a zero.
        n_rotated: number of rotated places, from the first; the second half of them is rotated with
            the first half.
    """

    size: int
    features: tuple[int, ...]
    n_rotated: int

    @property
    def is_plain(self) -> bool:
        """Whether it has no zeros."""
        return -1 not in self.features


def padded_head(config: GPTConfig) -> PaddedHead:
    """The smallest head that onnxruntime's attention supports and that holds the model's: sizes are
    multiples of 8 or, with rotary embeddings, of 16, as are their rotated parts."""
    D, n = config.head_dim, config.rope.n_rotated(config.head_dim) if config.rope else 0
    half, zeros = n // 2, (-1,) * (-n % ROTARY_MULTIPLE // 2)
    features = (*range(half), *zeros, *range(half, n), *zeros, *range(n, D))
    multiple = ROTARY_MULTIPLE if config.rope else HEAD_MULTIPLE
    features += (-1,) * (-len(features) % multiple)
    return PaddedHead(len(features), features, n + 2 * len(zeros))


def norm(g: "Graph", module: str, name: str, x: str) -> str:
    """The norm `name` of a module (a path or empty), over the last axis of x; without a name, x
    itself."""
    if not name:
        return x
    family, path = g.config.architecture, f"{module}.{name}".lstrip(".")
    weight = g.weight(f"{path}.weight")
    if family.norm_offset:
        whole = g.weights[weight] + g.weights_type.type(family.norm_offset)
        weight = g.constant(f"{path}.whole", whole)
    if family.norm == "rms_norm":
        return g.op("RMSNormalization", x, weight, name=path, axis=-1, epsilon=g.epsilon)
    bias = g.weight(f"{path}.bias")
    return g.op("LayerNormalization", x, weight, bias, name=path, axis=-1, epsilon=g.epsilon)


def attention(g: "Graph", layer: int, x: str) -> str:
    """Causal self-attention of x (B, T, C) over the cache, before the output projection."""
    config, family, kind = g.config, g.config.architecture, g.config.kinds[layer]
    name = f"{family.block(layer)}.{family.column('heads').name}"
    qkv = g.linear(name, x)
    if family.head_norms:
        qkv = _with_normed_heads(g, layer, qkv)
    head = padded_head(config)
    if not head.is_plain:
        qkv = _rearranged(g, qkv, config.head_dim, head.features)
    output = name.rpartition(".")[0]
    rotary = _rotary_caches(g, kind.rope, head) if kind.rope else ()
    n_head, n_kv_head = config.n_head[layer], config.n_kv_head[layer]
    heads = Heads(n_head, n_kv_head, config.score_scale, kind.window, rotary)
    g.nodes.append(attention_node(layer, qkv, heads, output, g.dtype))
    g.declare(output, "batch", "length", n_head * head.size)
    if head.is_plain:
        return output
    places = tuple(head.features.index(feature) for feature in range(config.head_dim))
    return _rearranged(g, output, head.size, places)


def _rearranged(g: "Graph", x: str, size: int, places: tuple[int, ...]) -> str:
    """Heads (B, T, n * size) with the features at `places` in each head, and a zero for -1."""
    shapes = {"old": np.array([0, 0, -1, size]), "new": np.array([0, 0, -1])}
    heads = g.op("Reshape", x, g.constant(f"heads_of_{size}", shapes["old"]))
    if -1 in places:  # the last feature of a head that has one more is 0
        one_more = g.constant("one_feature", np.array([0, 0, 0, 0, 0, 0, 0, 1]))
        heads = g.op("Pad", heads, one_more)
    index = g.constant(f"places_in_{size}", np.array(places) % (size + (-1 in places)))
    return g.op(
        "Reshape",
        g.op("Gather", heads, index, axis=3),
        g.constant("heads_together", shapes["new"]),
    )


def activated(g: "Graph", rows: str) -> str:
    """The activated FFN channels of rows (B, T, F), or of gates and factors (B, T, 2 F)."""
    if not g.config.architecture.gated:
        return _activation(g, rows)
    gate, up = g.ops("Split", 2, rows, axis=-1, num_outputs=2)
    return g.op("Mul", _activation(g, gate), up)


def _activation(g: "Graph", x: str) -> str:
    kind = g.config.architecture.activation
    if kind == "silu":
        return g.op("Mul", x, g.op("Sigmoid", x))
    if kind == "relu":
        return g.op("Relu", x)
    return g.op("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _with_normed_heads(g: "Graph", layer: int, qkv: str) -> str:
    """Queries, keys and values (B, T, (H + 2 G) D), with queries and keys normalized per head or
    over all heads together."""
    config = g.config
    widths, D = config.layer_widths(layer), config.head_dim
    sizes = np.array([widths["heads"], widths["kv_heads"], widths["kv_heads"]])
    split = g.constant(f"qkv_sizes_{'_'.join(map(str, sizes))}", sizes)
    parts = g.ops("Split", 3, qkv, split, axis=-1)
    apart = g.constant("heads_apart", np.array([0, 0, -1, D]))
    block = config.architecture.block(layer)
    for k, name in enumerate(config.architecture.head_norms):
        if config.architecture.norms_whole:
            parts[k] = norm(g, block, name, parts[k])
            continue
        normed = norm(g, block, name, g.op("Reshape", parts[k], apart))
        together = g.constant(f"together_{sizes[k]}", np.array([0, 0, sizes[k]]))
        parts[k] = g.op("Reshape", normed, together)
    return g.op("Concat", *parts, axis=-1)


def _rotary_caches(g: "Graph", rope: Rope, head: PaddedHead) -> tuple[str, str]:
    """Names of the cosines and sines (positions, head.n_rotated / 2) for all positions. The graph
    computes them from the frequencies, once, when onnxruntime loads it: a stored table of many
    positions would be larger than a small model."""
    if rope not in g.rotations:
        suffix = f"_{len(g.rotations)}" if g.rotations else ""
        found = frequencies(rope, g.config.head_dim)
        padded = np.zeros(head.n_rotated // 2, np.float32)
        padded[: len(found)] = found.numpy()  # a zero is not turned
        ends = zip(
            ("zero", "n_positions", "one"),
            (0, g.config.n_prefix + g.config.n_positions, 1),
            strict=True,
        )
        tokens = g.op("Range", *(g.constant(name, np.array(end)) for name, end in ends))
        column = g.op("Unsqueeze", tokens, g.constant("last_axis", np.array([-1], np.int64)))
        floats = g.op("Cast", column, to=TensorProto.FLOAT)
        angles = g.op("Mul", floats, g.constant(f"frequencies{suffix}", padded))
        cosines, sines = (g.op(kind, angles) for kind in ("Cos", "Sin"))
        if rope.attention_factor != 1:
            factor = np.array(rope.attention_factor, np.float32)
            by = g.constant(f"attention_factor{suffix}", factor)
            cosines, sines = (g.op("Mul", x, by) for x in (cosines, sines))
        if g.dtype != TensorProto.FLOAT:
            cosines, sines = (g.op("Cast", x, to=g.dtype) for x in (cosines, sines))
        g.rotations[rope] = cosines, sines
    return g.rotations[rope]
