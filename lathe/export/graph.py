"""An ONNX graph built node by node, and attention in it: over a batch, or over the two parts of a
mixed step. `lathe.export.weight_formats` adds quantized linears.

onnxruntime's GroupQueryAttention appends several tokens to one row, or one token to each of several
rows. A mixed step does both, to two caches. It is one branch of an `If`, and the ordinary step is
the other; in either branch the unused cache passes through without being copied.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lathe.model.architecture import Rope
from lathe.model.config import GPTConfig
from lathe.model.quantization import QuantizationPlan
from lathe_serving.runtime.exported_model import PREFIX_LENGTH, WEIGHTS

Weight = NDArray[np.float32] | NDArray[np.float16]

MICROSOFT = "com.microsoft"
MIXED, SIZES, CHUNK_SEQLENS = "mixed", "mixed_sizes", "chunk_seqlens_k"
PARTS = ("key", "value")
Nodes = list[onnx.NodeProto]
PROTOBUF_LIMIT = 2**31 - 2**20  # bytes of one file, with room for the nodes
MIN_EXTERNAL_BYTES = 1024  # smaller tensors, such as shapes, stay in the graph
PAGE = 4096  # weights begin at pages, which are mapped into memory
HEAD_MULTIPLE = 8
"""onnxruntime's GroupQueryAttention supports head sizes that are a multiple of this,"""
ROTARY_MULTIPLE = 16
"""and, if it rotates queries and keys, head sizes and rotated parts that are a multiple of this."""
SCALES_INPUT = 12
"""Index of GroupQueryAttention's first input that is a scale of its cache."""


class Graph:
    """Builder of a graph: its methods add nodes and initializers and return an output's name.

    Attributes:
        model: the finished graph without its initializers.
    """

    model: onnx.ModelProto

    def __init__(
        self,
        weights: Mapping[str, Weight],
        plan: QuantizationPlan | None,
        config: GPTConfig,
    ) -> None:
        self.weights, self.plan, self.config = weights, plan, config
        self.epsilon, self.tables = config.layer_norm_epsilon, config.tables
        self.weights_type = weights[config.architecture.table].dtype
        self.dtype = helper.np_dtype_to_tensor_dtype(self.weights_type)
        self.nodes = list(mixed_inputs())
        self.constants: dict[str, NDArray[Any]] = {}  # quantized weights among them
        self.kept: set[str] = set()  # names of float weights
        self.declared: list[onnx.ValueInfoProto] = []  # results of operators unknown to the checker
        self.rotations: dict[Rope, tuple[str, str]] = {}  # names of cosines and sines

    def op(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        output = name or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def ops(self, op_type: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several outputs; returns their names."""
        name = f"{op_type}_{len(self.nodes)}"
        names = [f"{name}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=name, **attributes))
        return names

    def declare(self, name: str, *shape: int | str | None) -> None:
        """Declare the shape of a result that the checker cannot infer."""
        self.declared.append(_value(name, self.dtype, *shape))

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; returns its name."""
        self.constants.setdefault(name, value)
        return name

    def weight(self, name: str) -> str:
        """Add a float weight if it is missing; returns its name."""
        self.kept.add(name)
        return name

    def wanted(self, x: str) -> str:
        """Rows of x (batch, length, C) at `logits_index` -> (batch, k, C)."""
        last = self.constant("last_axis", np.array([-1], np.int64))
        index = self.op("Unsqueeze", "logits_index", last)
        return self.op("GatherND", x, index, batch_dims=1)

    @property
    def n_bytes(self) -> int:
        """Size of the initializers."""
        return sum(value.nbytes for _, value in self.initializers())

    def initializers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """All initializers with their values."""
        yield from self.constants.items()
        for name in sorted(self.kept):
            yield name, self.weights[name]

    def save(self, path: Path) -> None:
        """Write the file, or, of more than 2 GB, a file without weights and `WEIGHTS` beside it,
        whose digest it names: the digest of a graph tells apart models that differ in weights."""
        if self.n_bytes < PROTOBUF_LIMIT:
            self._write(path, (self._initializer(*each) for each in self.initializers()))
            return
        initializers, digest = [], hashlib.sha256()
        with (path.parent / WEIGHTS).open("wb") as file:
            for name, value in self.initializers():
                if value.nbytes < MIN_EXTERNAL_BYTES:
                    initializers.append(self._initializer(name, value))
                    continue
                gap, data = bytes(-file.tell() % PAGE), numpy_helper.tobytes_little_endian(value)
                place = {"location": WEIGHTS, "offset": file.tell() + len(gap), "length": len(data)}
                for chunk in (gap, data):
                    file.write(chunk)
                    digest.update(chunk)
                tensor = self._initializer(name, value, has_data=False)
                tensor.data_location = TensorProto.EXTERNAL
                for key, entry in place.items():
                    tensor.external_data.add(key=key, value=str(entry))
                initializers.append(tensor)
        helper.set_model_props(self.model, {"weights_sha256": digest.hexdigest()})
        self._write(path, initializers)

    def _write(self, path: Path, initializers: Iterable[TensorProto]) -> None:
        # One at a time: concatenated protobuf messages are read as one merged message.
        with path.open("wb") as file:
            file.write(self.model.SerializeToString())
            for tensor in initializers:
                part = onnx.ModelProto()
                part.graph.initializer.append(tensor)
                file.write(part.SerializeToString())

    @staticmethod
    def _initializer(name: str, value: NDArray[Any], has_data: bool = True) -> TensorProto:
        return TensorProto(
            name=name,
            dims=value.shape,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            raw_data=numpy_helper.tobytes_little_endian(value) if has_data else None,
        )

    def without_weights(self, config: GPTConfig, opset: int) -> onnx.ModelProto:
        """The model with the initializers' names and shapes but not their values."""
        int64, int32 = TensorProto.INT64, TensorProto.INT32
        inputs = [
            _value("input_ids", int64, "batch", "length"),
            _value("position_ids", int64, "batch", "length"),
            _value("seqlens_k", int32, "rows"),
            _value("total_sequence_length", int32),
            _value("logits_index", int64, "batch", "k"),
            _value("chunk_length", int64),
            _value("chunk_total", int32),
        ]
        if config.n_prefix:
            inputs.append(_value(PREFIX_LENGTH, int64))
        outputs = [_value("logits", TensorProto.FLOAT, "batch", "k", config.vocab_size)]
        cache_type = TensorProto.INT8 if self.plan and self.plan.kv_cache_bits else self.dtype
        for rows, prefix in (("rows", ""), (1, "chunk_")):  # the two caches of a mixed step
            size = padded_head(config).size
            for (i, n_head), part in product(enumerate(config.n_kv_head), PARTS):
                past = (rows, n_head, f"{prefix}past", size)
                present = (rows, n_head, f"{prefix}total", size)
                inputs.append(_value(f"{prefix}past_{part}_{i}", cache_type, *past))
                outputs.append(_value(f"{prefix}present_{part}_{i}", cache_type, *present))
        graph = helper.make_graph(
            self.nodes,
            "gpt",
            inputs,
            outputs,
            value_info=self.declared,
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets[:1]),
            producer_name="lathe",
        )


def _value(name: str, dtype: int, *shape: int | str | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def mixed_inputs() -> Iterator[onnx.NodeProto]:
    """Nodes that all attention layers share: whether the step is mixed, and the sizes of its
    parts."""
    for name, dtype, shape, value in (
        ("zero_tokens", TensorProto.INT64, [], 0),
        ("first_axis", TensorProto.INT64, [1], 0),
        ("one_token", TensorProto.INT32, [1], 1),
    ):
        tensor = helper.make_tensor(name, dtype, shape, [value])
        yield helper.make_node("Constant", [], [name], value=tensor)
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

    def padded(self, rows: NDArray[Any], value: float) -> NDArray[Any]:
        """Rows (..., D) of the model's features -> (..., size), with `value` for a zero."""
        ends = np.full((*rows.shape[:-1], 1), value, rows.dtype)
        return np.concatenate((rows, ends), -1)[..., self.features]  # -1 is the end


def padded_head(config: GPTConfig) -> PaddedHead:
    """The smallest head that onnxruntime's attention supports and that holds the model's: sizes are
    multiples of 8 or, with rotary embeddings, of 16, as are their rotated parts."""
    D, n = config.head_dim, config.rope.n_rotated(config.head_dim) if config.rope else 0
    half, zeros = n // 2, (-1,) * (-n % ROTARY_MULTIPLE // 2)
    # Zeros behind each half of the rotated part, so that partners keep their distance of half.
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
        cache_scales: names of the scales of INT8 keys and values, or none if the cache is float.
    """

    n_head: int
    n_kv_head: int
    scale: float
    window: int | None = None
    rotary: tuple[str, ...] = ()
    cache_scales: tuple[str, ...] = ()


def attention_node(i: int, qkv: str, heads: LayerHeads, output: str, dtype: int) -> onnx.NodeProto:
    """Causal self-attention of layer i.

    Args:
        qkv: (batch, length, W), queries, keys and values, or (1, chunk + rows, W) in a mixed step.
        output: name of the result, (batch, length, C).
        dtype: of `qkv` and of the result, one of TensorProto's.
    """
    # The ordinary step: all rows together; the chunk's cache passes through.
    ordinary = _IfBranch(i, heads, "ordinary")
    attended, *appended = ordinary.attend(qkv, "past", "seqlens_k", "total_sequence_length")
    kept = [ordinary.add("Identity", [name]) for name in _caches("chunk_past", i)]
    # The mixed step: a chunk of one prompt, and behind it a token for each row, which become a
    # batch (rows, 1, W) for their own attention.
    mixed = _IfBranch(i, heads, "mixed")
    chunk, packed = mixed.add_many("Split", [qkv, SIZES], 2, axis=1)
    rows = mixed.add("Transpose", [packed], perm=[1, 0, 2])
    chunk, *chunk_cache = mixed.attend(chunk, "chunk_past", CHUNK_SEQLENS, "chunk_total")
    rows, *cache = mixed.attend(rows, "past", "seqlens_k", "total_sequence_length")
    packed = mixed.add("Transpose", [rows], perm=[1, 0, 2])
    together = mixed.add("Concat", [chunk, packed], axis=1)
    return helper.make_node(
        "If",
        [MIXED],
        [output, *_caches("present", i), *_caches("chunk_present", i)],
        name=output,
        then_branch=mixed.graph(together, [*cache, *chunk_cache], dtype),
        else_branch=ordinary.graph(attended, [*appended, *kept], dtype),
    )


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
        inputs = [qkv, "", "", *_caches(cache, self.i), seqlens, total, *self.heads.rotary]
        rounded: dict[str, Any] = {}
        if self.heads.cache_scales:
            inputs += [""] * (SCALES_INPUT - len(inputs)) + [*self.heads.cache_scales]
            kinds = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            rounded = {**kinds, "kv_cache_bit_width": 8}
        return self.add_many(
            "GroupQueryAttention",
            inputs,
            3,
            domain=MICROSOFT,
            num_heads=self.heads.n_head,
            kv_num_heads=self.heads.n_kv_head,
            scale=self.heads.scale,
            **({"local_window_size": self.heads.window} if self.heads.window else {}),
            **({"do_rotary": 1} if self.heads.rotary else {}),
            **rounded,
        )

    def graph(self, attended: str, caches: list[str], dtype: int) -> onnx.GraphProto:
        # Without shapes: the checker does not know GroupQueryAttention.
        types = [dtype] + [TensorProto.INT8 if self.heads.cache_scales else dtype] * len(caches)
        outputs = zip([attended, *caches], types, strict=True)
        values = [helper.make_tensor_value_info(output, kind, None) for output, kind in outputs]
        return helper.make_graph(self.nodes, f"h.{self.i}.{self.name}", [], values)


def _caches(kind: str, i: int) -> list[str]:
    return [f"{kind}_{part}_{i}" for part in PARTS]
