"""A model as an ONNX graph: embedding, blocks and head, from its family's description.

Batch and length are dynamic. One graph serves prefill, decode, scoring, and steps that are both
prefill and decode ("mixed").

Inputs
    input_ids              int64 (batch, length), rows right-padded
    position_ids           int64 (batch, length)
    seqlens_k              int32 (rows,), valid tokens of the row including these, minus one
    total_sequence_length  int32 (), the longest row, past and present
    logits_index           int64 (batch, k), positions within `length` whose logits are wanted
    chunk_length           int64 (), 0 unless the step is mixed
    chunk_total            int32 (), tokens of the chunk's prompt, past and present
    prefix_length          int64 (), only of a model with a prefix, see below
    past_key_{i}, past_value_{i}        type of the weights (rows, n_kv_head_i, past, head_dim)
    chunk_past_key_{i}, ..._value_{i}   type of the weights (1, n_kv_head_i, past, head_dim)
Outputs
    logits                 float32 (batch, k, vocab)
    present_key_{i}, present_value_{i}  type of the weights (rows, n_kv_head_i, total, head_dim)
    chunk_present_key_{i}, ..._value_{i}                    (1, n_kv_head_i, total, head_dim)

In a mixed step, batch is 1 and `input_ids` packs `chunk_length` tokens of one prompt and after them
one token for each of the rows: everything but attention reads the weights once for all of them
(Sarathi, Agrawal et al. 2023). Otherwise rows is batch, and the chunk's cache passes through.

A model with a prefix needs its keys and values, which stand beside the graph, at the beginning of
every past; positions, lengths and totals count them. The input `prefix_length` has no effect: it is
there so that a caller who does not know the prefix fails.

A head whose size onnxruntime's attention does not support is filled up with zeros in the caches
(`lathe.export.graph.padded_head`), and head_dim above includes them.

With I/O binding, past and present may share a buffer: attention then appends in place.
"""

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from lathe.export.graph import Graph, LayerHeads, PaddedHead, Weight, attention_node, padded_head
from lathe.export.weight_formats import linear, positions, stored_weights
from lathe.model.architecture import HEAD, Rope
from lathe.model.block import frequencies
from lathe.model.config import GPTConfig
from lathe.model.quantization import QuantizationPlan

RMS_OPSET = 23
"""The first opset with RMSNormalization."""


def build(
    config: GPTConfig,
    weights: Mapping[str, Weight],
    quantization: QuantizationPlan | None,
    opset: int = 21,
) -> Graph:
    """Build the graph of a model.

    Args:
        config: shape; heads and `n_inner` may differ from layer to layer.
        weights: by the model's names; linears are (in, out), and the matrices of a fused one stand
            one after the other. All float32 or all float16, which is also the type of the
            computation (a CPU has no kernels for float16).
        quantization: plan of a quantized flavour, which needs float32 weights; None: not quantized.
        opset: ONNX opset, at least 20 (the first with Gelu); RMSNorm takes 23 or more.

    Raises:
        ValueError: a plan, and weights that are not float32.

    A tied embedding matrix is stored once; onnxruntime folds its transpose when it loads.
    """
    family = config.architecture
    if quantization and weights[family.table].dtype != np.float32:
        raise ValueError("a quantization plan needs float32 weights")
    if family.norm == "rms_norm":
        opset = max(opset, RMS_OPSET)
    g = Graph(weights, quantization, config)
    x = stored_weights(g, HEAD).embedding(g, "input_ids")
    if config.embedding_scale != 1:
        scale = np.array(config.embedding_scale, g.weights_type)
        x = g.op("Mul", x, g.constant("embedding_scale", scale))
    if family.positions == "learned":
        x = g.op("Add", x, positions(g, "position_ids"))
    first, second = family.block_norms or ("", "")
    behind_first, behind_second = family.output_norms or ("", "")
    for i in range(config.n_layer):
        layer = family.block(i)
        attended = attention(g, i, norm(g, layer, first, x))
        if i == config.n_layer - 1:
            # After the last attention, no other positions are needed.
            x, attended = g.wanted(x), g.wanted(attended)
        out = linear(g, f"{layer}.{family.row('heads').name}", attended)
        between = g.op("Add", x, norm(g, layer, behind_first, out))
        column, row = config.unit_linears("channels")
        read = x if family.is_parallel else between
        inner = linear(g, f"{layer}.{column.name}", norm(g, layer, second, read))
        out = linear(g, f"{layer}.{row.name}", activated(g, inner))
        x = g.op("Add", between, norm(g, layer, behind_second, out))
    stored_weights(g, HEAD).head(g, norm(g, "", family.final_norm, x))
    # Nodes only: `save` appends the initializers one by one.
    g.model = g.without_weights(config, opset)
    return g


def norm(g: Graph, module: str, name: str, x: str) -> str:
    """The norm `name` of a module (a path or empty), over the last axis of x; without a name, x
    itself."""
    if not name:
        return x
    family, path = g.config.architecture, f"{module}.{name}".lstrip(".")
    weight = g.weight(f"{path}.weight")
    if family.norm_offset:  # added here, once: the operator has no such input
        whole = g.weights[weight] + g.weights_type.type(family.norm_offset)
        weight = g.constant(f"{path}.whole", whole)
    if family.norm == "rms_norm":
        return g.op("RMSNormalization", x, weight, name=path, axis=-1, epsilon=g.epsilon)
    bias = g.weight(f"{path}.bias")
    return g.op("LayerNormalization", x, weight, bias, name=path, axis=-1, epsilon=g.epsilon)


def attention(g: Graph, layer: int, x: str) -> str:
    """Causal self-attention of x (B, T, C) over the cache, before the output projection."""
    config, family, kind = g.config, g.config.architecture, g.config.kinds[layer]
    name = f"{family.block(layer)}.{family.column('heads').name}"
    qkv = linear(g, name, x)
    if family.head_norms:
        qkv = _with_normed_heads(g, layer, qkv)
    head = padded_head(config)
    if not head.is_plain:
        qkv = _rearranged(g, qkv, config.head_dim, head.features)
    output = name.rpartition(".")[0]  # the attention's module
    rotary = _rotary_caches(g, kind.rope, head) if kind.rope else ()
    n_head, n_kv_head = config.n_head[layer], config.n_kv_head[layer]
    cached: tuple[str, ...] = ()
    if g.plan and g.plan.kv_cache_bits:
        cached = tuple(
            g.constant(f"{part}.scale", head.padded(g.weights[f"{part}.scale"], 1)[None, :, None])
            for part in family.cached_parts(layer)
        )
    heads = LayerHeads(n_head, n_kv_head, config.score_scale, kind.window, rotary, cached)
    g.nodes.append(attention_node(layer, qkv, heads, output, g.dtype))
    g.declare(output, "batch", "length", n_head * head.size)
    if head.is_plain:
        return output
    columns = tuple(head.features.index(feature) for feature in range(config.head_dim))
    return _rearranged(g, output, head.size, columns)


def _rearranged(g: Graph, x: str, size: int, columns: tuple[int, ...]) -> str:
    """Heads (B, T, n * size) with the features at `columns` of each head, and a zero for -1."""
    shapes = {"old": np.array([0, 0, -1, size]), "new": np.array([0, 0, -1])}
    heads = g.op("Reshape", x, g.constant(f"heads_of_{size}", shapes["old"]))
    if -1 in columns:  # the last feature of a head that has one more is 0
        one_more = g.constant("one_feature", np.array([0, 0, 0, 0, 0, 0, 0, 1]))
        heads = g.op("Pad", heads, one_more)
    index = g.constant(f"places_in_{size}", np.array(columns) % (size + (-1 in columns)))
    return g.op(
        "Reshape",
        g.op("Gather", heads, index, axis=3),
        g.constant("heads_together", shapes["new"]),
    )


def activated(g: Graph, rows: str) -> str:
    """The activated FFN channels of rows (B, T, F), or of gates and factors (B, T, 2 F)."""
    if not g.config.architecture.gated:
        return _activation(g, rows)
    gate, up = g.ops("Split", 2, rows, axis=-1, num_outputs=2)
    return g.op("Mul", _activation(g, gate), up)


def _activation(g: Graph, x: str) -> str:
    kind = g.config.architecture.activation
    if kind == "silu":
        return g.op("Mul", x, g.op("Sigmoid", x))
    if kind == "relu":
        return g.op("Relu", x)
    return g.op("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _with_normed_heads(g: Graph, layer: int, qkv: str) -> str:
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


def _rotary_caches(g: Graph, rope: Rope, head: PaddedHead) -> tuple[str, str]:
    """Names of the cosines and sines (positions, head.n_rotated / 2) for all positions. The graph
    computes them from the frequencies, once, when onnxruntime loads it: a stored table of many
    positions would be larger than a small model."""
    if rope not in g.rotations:
        suffix = f"_{len(g.rotations)}" if g.rotations else ""
        radians = frequencies(rope, g.config.head_dim)
        padded = np.zeros(head.n_rotated // 2, np.float32)
        padded[: len(radians)] = radians.numpy()  # a zero is not turned
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
