"""Attention in the ONNX graph: over a batch, or over the two parts of a mixed step.

onnxruntime's GroupQueryAttention appends several tokens to one row, or one token to each of several
rows. A mixed step does both, to two caches. It is one branch of an `If`, and the ordinary step is
the other; in either branch the unused cache passes through without being copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from lathe.model.config import GPTConfig

MICROSOFT = "com.microsoft"
MIXED, SIZES, CHUNK_SEQLENS = "mixed", "mixed_sizes", "chunk_seqlens_k"
PARTS = ("key", "value")
Nodes = list[onnx.NodeProto]
HEAD_MULTIPLE = 8
"""onnxruntime's GroupQueryAttention supports head sizes that are a multiple of this,"""
ROTARY_MULTIPLE = 16
"""and, if it rotates queries and keys, head sizes and rotated parts that are a multiple of this."""


def mixed_inputs() -> Iterator[onnx.NodeProto]:
    """Nodes that all attention layers share: whether the step is mixed, and the sizes of its
    parts."""
    yield _constant("zero_tokens", onnx.TensorProto.INT64, [])
    yield _constant("first_axis", onnx.TensorProto.INT64, [1])
    yield _constant("one_token", onnx.TensorProto.INT32, [1], 1)
    yield helper.make_node("Greater", ["chunk_length", "zero_tokens"], [MIXED])
    yield helper.make_node("Shape", ["seqlens_k"], ["mixed_rows"])
    yield helper.make_node("Unsqueeze", ["chunk_length", "first_axis"], ["chunk_lengths"])
    yield helper.make_node("Concat", ["chunk_lengths", "mixed_rows"], [SIZES], axis=0)
    yield helper.make_node("Sub", ["chunk_total", "one_token"], [CHUNK_SEQLENS])


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


@dataclass(frozen=True)
class LayerHeads:
    """The heads of a layer.

    Attributes:
        n_head, n_kv_head: number of query heads, and of key-value heads.
        scale: factor of attention scores.
        window: number of tokens that a query attends to, or None.
        rotary: names of the cosines and sines of rotary positions, or none.
    """

    n_head: int
    n_kv_head: int
    scale: float
    window: int | None = None
    rotary: tuple[str, ...] = ()


def attention_node(i: int, qkv: str, heads: LayerHeads, output: str, dtype: int) -> onnx.NodeProto:
    """Causal self-attention of layer i.

    Args:
        qkv: (batch, length, W), queries, keys and values, or (1, chunk + rows, W) in a mixed step.
        output: name of the result, (batch, length, C).
        dtype: of `qkv` and of the result, one of TensorProto's.
    """
    return helper.make_node(
        "If",
        [MIXED],
        [output, *_caches("present", i), *_caches("chunk_present", i)],
        name=output,
        then_branch=_mixed(i, qkv, heads, dtype),
        else_branch=_ordinary(i, qkv, heads, dtype),
    )


def _ordinary(i: int, qkv: str, heads: LayerHeads, dtype: int) -> onnx.GraphProto:
    step = _IfBranch(i, heads, "ordinary")
    output = step.attend(qkv, "past", "seqlens_k", "total_sequence_length")
    kept = [step.add("Identity", [name]) for name in _caches("chunk_past", i)]
    return step.graph([*output, *kept], dtype)


def _mixed(i: int, qkv: str, heads: LayerHeads, dtype: int) -> onnx.GraphProto:
    step = _IfBranch(i, heads, "mixed")
    chunk, packed = step.add_many("Split", [qkv, SIZES], 2, axis=1)
    rows = step.add("Transpose", [packed], perm=[1, 0, 2])  # (rows, 1, W)
    chunk, *chunk_cache = step.attend(chunk, "chunk_past", CHUNK_SEQLENS, "chunk_total")
    rows, *cache = step.attend(rows, "past", "seqlens_k", "total_sequence_length")
    packed = step.add("Transpose", [rows], perm=[1, 0, 2])
    output = step.add("Concat", [chunk, packed], axis=1)
    return step.graph([output, *cache, *chunk_cache], dtype)


class _IfBranch:
    """Builder of a branch of the `If` of layer i."""

    def __init__(self, i: int, heads: LayerHeads, name: str) -> None:
        self.i, self.heads, self.name = i, heads, name
        self.nodes: Nodes = []

    def add(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        return self.add_many(op_type, inputs, 1, **attributes)[0]

    def add_many(
        self, op_type: str, inputs: list[str], outputs: int, **attributes: Any
    ) -> list[str]:
        name = f"h.{self.i}.{self.name}.{op_type}_{len(self.nodes)}"
        made = [f"{name}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name=name, **attributes))
        return made

    def attend(self, qkv: str, cache: str, seqlens: str, total: str) -> list[str]:
        """Attention, and the cache with the new tokens appended."""
        return self.add_many(
            "GroupQueryAttention",
            [qkv, "", "", *_caches(cache, self.i), seqlens, total, *self.heads.rotary],
            3,
            domain=MICROSOFT,
            num_heads=self.heads.n_head,
            kv_num_heads=self.heads.n_kv_head,
            scale=self.heads.scale,
            **({"local_window_size": self.heads.window} if self.heads.window else {}),
            **({"do_rotary": 1} if self.heads.rotary else {}),
        )

    def graph(self, outputs: list[str], dtype: int) -> onnx.GraphProto:
        values = [helper.make_tensor_value_info(output, dtype, None) for output in outputs]
        return helper.make_graph(self.nodes, f"h.{self.i}.{self.name}", [], values)


def _caches(kind: str, i: int) -> list[str]:
    return [f"{kind}_{part}_{i}" for part in PARTS]


def _constant(name: str, dtype: int, shape: list[int], value: int = 0) -> onnx.NodeProto:
    tensor = helper.make_tensor(name, dtype, shape, [value])
    return helper.make_node("Constant", [], [name], value=tensor)
