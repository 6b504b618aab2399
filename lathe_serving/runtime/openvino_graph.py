"""Translates an export's ONNX graph to OpenVINO operators, with paged attention.

Nodes are translated one by one, which covers all families and weight formats, and weights remain
the export's integers. Differences from the ONNX graph:

- A step's tokens are packed, N tokens of S sequences one after another, batch 1; paged attention
  gets the start of each sequence and the cache blocks of its keys and values, so the branch for
  mixed steps is not needed.
- Inputs of INT8 linears are rounded by a `FakeQuantize`, which OpenVINO fuses into integer
  products. Inputs of linears with group scales are rounded by OpenVINO's kernel itself, like
  onnxruntime's (`DYNAMIC_QUANTIZATION_GROUP_SIZE`).

Source of paged attention: Kwon et al., SOSP 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from openvino import Model, Node, Output, PartialShape, Shape, Tensor, Type, op
from openvino import opset15 as ops

from lathe_serving.runtime.session import ROUNDED_INPUT

LAYOUT = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
BLOCK_TOKENS = (
    32  # tokens of a cache's block; the only size that OpenVINO's attention for CPUs takes
)
MAX_CONTEXT_INPUT = "max_context_len"
LEVELS = 256  # of an INT8 activation, around zero
SIGNS = {4: 0x88, 8: 0x80}  # by bits: turns unsigned integers into two's complements
Array = NDArray[Any]


@dataclass(frozen=True)
class Rounded:
    """A tensor to be rounded to multiples of a scale."""

    x: Output
    scale: Array


@dataclass(frozen=True)
class Integers:
    """A weight (in, out) in int8, with a scale for each column."""

    values: Array
    scale: Array


@dataclass(frozen=True)
class Heads:
    """The heads of a layer; see `lathe.export.graph.LayerHeads`."""

    layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    scale: float
    window: int

    @property
    def widths(self) -> list[int]:
        """Sizes of all queries, keys and values of a token."""
        return [n * self.head_dim for n in (self.n_head, self.n_kv_head, self.n_kv_head)]


Value: TypeAlias = "Output | Array | Rounded | Integers"


def translate(path: Path, cache_type: Type) -> tuple[Model, int]:
    """The graph of an exported file.

    Args:
        cache_type: of keys and values.

    Returns:
        A model from `input_ids` and `position_ids` (1, N), `logits_index` (1, k), `LAYOUT` and
        `MAX_CONTEXT_INPUT` as OpenVINO's paged attention reads them, and `key_cache.i`,
        `value_cache.i` to `logits` (1, k, V); and the size of the groups in which inputs of
        integer weights are to be rounded, 0 where some of them stay in float.
    """
    translator = _PagedTranslator(onnx.load(path).graph, cache_type)
    return translator.model(), translator.group


class Translator:
    """Translates a graph node by node, but for attention.

    Attributes:
        values: outputs of nodes, by their names in the ONNX graph.
        inputs, sinks: those of the model.
        groups: group sizes in which inputs of integer weights are rounded; 0: not rounded.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.inputs: list[Node] = []
        self.sinks: list[Node] = []
        self.groups: set[int] = set()
        self.values: dict[str, Value] = {
            t.name: numpy_helper.to_array(t) for t in graph.initializer
        }
        dims = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
        self.cache_dims = {
            name: (d[1].dim_value, d[3].dim_value) for name, d in dims.items() if d[3:]
        }

    def model(self) -> Model:
        """The translated model."""
        # The nodes that the logits depend on, from the end. Those for mixed steps drop out: an `If`
        # counts as the attention in its branch for ordinary steps.
        needed, nodes = {"logits"}, []
        for node in reversed(self.graph.node):
            if needed.isdisjoint(node.output):
                continue
            read = _branch_attention(node) if node.op_type == "If" else node
            needed |= {name for name in read.input if name not in self.cache_dims}
            nodes.append(node)
        for node in reversed(nodes):
            self.values[node.output[0]] = self.translated(node)
        result = ops.result(self.output("logits"))
        result.output(0).get_tensor().set_names({"logits"})
        return Model([result], self.sinks, self.inputs, "gpt")

    @property
    def group(self) -> int:
        """Size of the groups in which inputs of all integer weights are rounded, or 0."""
        return min(self.groups, default=0)

    def input(self, name: str, kind: Type, *shape: int) -> Output:
        """Add an input to the model; -1 is any size."""
        parameter = ops.parameter(PartialShape(list(shape)), kind, name=name)
        parameter.output(0).get_tensor().set_names({name})
        self.inputs.append(parameter)
        return parameter.output(0)

    def _array(self, name: str) -> Array:
        value = self.values[name]
        assert isinstance(value, np.ndarray), f"{name} is no constant"
        return value

    def output(self, name: str) -> Output:
        """The value with this name in the ONNX graph."""
        value = self.values[name]
        if isinstance(value, np.ndarray):
            return ops.constant(value, name=name).output(0)
        assert isinstance(value, Output), f"{name} is a quantized tensor"
        return value

    def given(self, node: onnx.NodeProto) -> list[Output]:
        """The inputs of a node."""
        return [self.output(name) for name in node.input]

    def translated(self, node: onnx.NodeProto) -> Value:
        """The first output of a node; operators on constants alone are computed here."""
        x = self.values.get(node.input[0])
        match node.op_type:
            case "Add":
                return ops.add(*self.given(node)).output(0)
            case "Mul":
                other = self.values[node.input[1]]
                if isinstance(x, np.ndarray) and isinstance(other, np.ndarray):
                    return np.multiply(x, other)
                return ops.multiply(*self.given(node)).output(0)
            case "Abs":
                return ops.absolute(*self.given(node)).output(0)
            case "ReduceMax":
                return ops.reduce_max(*self.given(node), keep_dims=True).output(0)
            case "Max":
                return ops.maximum(*self.given(node)).output(0)
            case "Div":
                return ops.divide(*self.given(node)).output(0)
            case "Round":
                return ops.round(*self.given(node), "half_to_even").output(0)
            case "Sigmoid":
                return ops.sigmoid(*self.given(node)).output(0)
            case "Relu":
                return ops.relu(*self.given(node)).output(0)
            case "Gelu":
                exact = _attributes(node)["approximate"] == b"none"
                return ops.gelu(*self.given(node), "erf" if exact else "tanh").output(0)
            case "Range":
                return np.arange(*(int(self._array(name)) for name in node.input))
            case "Cos":
                return np.cos(self._array(node.input[0]))
            case "Sin":
                return np.sin(self._array(node.input[0]))
            case "Cast":
                if isinstance(x, np.ndarray):
                    return x.astype(np.float32)
                return ops.convert(self.output(node.input[0]), "f32").output(0)
            case "LayerNormalization":
                x, weight, bias = self.given(node)
                epsilon = _attributes(node)["epsilon"]
                normal = ops.mvn(x, np.array([-1]), True, epsilon, "inside_sqrt")
                return ops.add(ops.multiply(normal, weight), bias).output(0)
            case "RMSNormalization":
                x, weight = self.given(node)
                mean = ops.reduce_mean(ops.power(x, np.float32(2)), np.array([-1]), True)
                root = ops.sqrt(ops.add(mean, np.float32(_attributes(node)["epsilon"])))
                return ops.multiply(ops.divide(x, root), weight).output(0)
            case "QuantizeLinear":
                return Rounded(self.output(node.input[0]), self._array(node.input[1]))
            case "DequantizeLinear":
                scale = self._array(node.input[1])
                if not isinstance(x, Rounded):
                    return Integers(self._array(node.input[0]), scale)
                # The plugin for CPUs fuses it into the product after it, if that is of integers.
                low, high = np.float32(-LEVELS / 2 * scale), np.float32((LEVELS / 2 - 1) * scale)
                return ops.fake_quantize(x.x, low, high, low, high, LEVELS).output(0)
            case "MatMul":
                factor, stored = self.output(node.input[0]), self.values[node.input[1]]
                is_float = factor.get_node().get_type_name() != "FakeQuantize"
                if isinstance(stored, Integers) and is_float:
                    self.groups.add(0)  # its input must not be rounded
                return ops.matmul(factor, self.weight(node), False, True).output(0)
            case "MatMulInteger":  # of integers in float32
                self.groups.add(0)
                zero_point = self._array(node.input[2]).astype(np.float32)
                x = ops.subtract(self.output(node.input[0]), zero_point)
                return ops.matmul(x, self.weight(node), False, True).output(0)
            case "MatMulNBits":
                return self._matmul_grouped(node)
            case "GatherBlockQuantized":
                return self._gather_grouped(node)
            case "If":
                return self._if(node)
        return self._moved(node)

    def _moved(self, node: onnx.NodeProto) -> Value:
        """The first output of a node that moves elements; the others are recorded."""
        x, attributes = self.values.get(node.input[0]), _attributes(node)
        match node.op_type:
            case "Gather":
                return ops.gather(*self.given(node), np.int64(attributes.get("axis", 0))).output(0)
            case "GatherND":
                return ops.gather_nd(*self.given(node), 1).output(0)
            case "Pad":
                ends = np.split(self._array(node.input[1]), 2)
                padded = ops.pad(self.output(node.input[0]), *ends, "constant", np.float32(0))
                return padded.output(0)
            case "Concat":
                return ops.concat(self.given(node), attributes["axis"]).output(0)
            case "Split":
                parts = self.output(node.input[0]), np.int64(attributes["axis"])
                if node.input[1:]:
                    divided = ops.variadic_split(*parts, self._array(node.input[1]))
                else:
                    divided = ops.split(*parts, len(node.output))
                self.values |= dict(zip(node.output, divided.outputs(), strict=True))
                return divided.output(0)
            case "Slice":
                start, stop, axes = map(self._array, node.input[1:])
                steps = np.ones(1, np.int64)
                return ops.slice(self.output(node.input[0]), start, stop, steps, axes).output(0)
            case "Transpose":
                return self._array(node.input[0]).T
            case "Unsqueeze":
                if isinstance(x, np.ndarray):
                    return np.expand_dims(x, tuple(self._array(node.input[1])))
                return ops.unsqueeze(*self.given(node)).output(0)
            case "Reshape":
                shape = self._array(node.input[1])
                if isinstance(x, np.ndarray):
                    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)])
                return ops.reshape(self.output(node.input[0]), shape, True).output(0)
        raise ValueError(f"the operator {node.op_type} is not translated")

    def weight(self, node: onnx.NodeProto) -> Output:
        """The weight (out, in) of a product, in float32; its integers if they are multiplied."""
        weight = self.values[node.input[1]]
        if isinstance(weight, Integers):
            integers = ops.constant(np.ascontiguousarray(weight.values.T))
            scaled = ops.multiply(ops.convert(integers, "f32"), weight.scale[:, None])
            return scaled.output(0)
        rows = ops.constant(np.ascontiguousarray(self._array(node.input[1]).T))
        return ops.convert(rows, "f32").output(0)

    def _matmul_grouped(self, node: onnx.NodeProto) -> Output:
        x, attributes = self.output(node.input[0]), _attributes(node)
        size = attributes["block_size"]
        rounds = attributes["accuracy_level"] == ROUNDED_INPUT
        self.groups.add(size if rounds else 0)
        if added := -attributes["K"] % size:
            ends = (np.array([0, 0, n]) for n in (0, added))
            x = ops.pad(x, *ends, "constant", np.float32(0)).output(0)
        product = ops.matmul(x, self.grouped_weight(node), False, True)
        if node.input[5:]:
            product = ops.add(product, self.output(node.input[5]))
        return product.output(0)

    def grouped_weight(self, node: onnx.NodeProto) -> Output:
        """The weight (out, in) of a product or of a lookup, padded with zeros to whole groups."""
        attributes, packed = _attributes(node), self._array(node.input[1 - is_lookup(node)])
        bits, size = attributes["bits"], attributes["block_size"]
        n_out, zeros = len(packed), self._zero_points(node)
        n_groups = 8 * packed.size // (bits * size * n_out)
        shape = [n_out, n_groups, size]
        if zeros is None:
            kind = Type.i4 if bits == 4 else Type.i8
            values = _integers(packed ^ SIGNS[bits], shape, kind)
        else:
            flat = np.append(zeros.reshape(-1), np.zeros(zeros.size % 2, np.uint8))
            offsets = _integers(flat[0::2] | (flat[1::2] << 4), [n_out, n_groups, 1], Type.u4)
            values = ops.subtract(_integers(packed, shape, Type.u4), offsets)
        scale = self._array(node.input[2]).reshape(n_out, n_groups, 1)
        rows = np.array([n_out, n_groups * size])
        return ops.reshape(ops.multiply(values, scale), rows, False).output(0)

    def _gather_grouped(self, node: onnx.NodeProto) -> Output:
        """Embeddings of ids (1, N) from bytes (V, C * bits / 8)."""
        table, ids, first = self._array(node.input[0]), self.output(node.input[1]), np.int64(0)
        unsigned, bits = ops.gather(ops.constant(table), ids, first), _attributes(node)["bits"]
        if bits == 4:
            halves = (
                ops.bitwise_and(unsigned, np.uint8(15)),
                ops.bitwise_right_shift(unsigned, np.uint8(4)),
            )
            unsigned = ops.concat([ops.unsqueeze(half, np.int64(3)) for half in halves], 3)
        scale, zeros = (
            self._array(node.input[2]).reshape(len(table), -1, 1),
            self._zero_points(node),
        )
        groups = ops.reshape(
            ops.convert(unsigned, "f32"), np.array([0, 0, scale.shape[1], -1]), True
        )
        offsets = np.float32(2 ** (bits - 1))
        if zeros is not None:
            offsets = ops.convert(ops.gather(ops.constant(zeros[..., None]), ids, first), "f32")
        scales = ops.gather(ops.constant(scale), ids, first)
        values = ops.multiply(ops.subtract(groups, offsets), scales)
        return ops.reshape(values, np.array([0, 0, -1]), True).output(0)

    def _zero_points(self, node: onnx.NodeProto) -> Array | None:
        """The zero points (O, G) of 4-bit groups, from 0 to 15, if they have any."""
        if not node.input[3:] or not node.input[3]:
            return None
        packed = self._array(node.input[3])
        both = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        n_groups = self._array(node.input[2]).size // len(packed)
        return both[:, :n_groups]

    def _if(self, node: onnx.NodeProto) -> Output:
        """Attention of the ordinary step."""
        attention = _branch_attention(node)
        attributes, (qkv, _, _, key_cache, *_) = _attributes(attention), attention.input
        head_dim = self.cache_dims[key_cache][1]
        heads = Heads(
            int(key_cache.rpartition("_")[2]),
            attributes["num_heads"],
            attributes["kv_num_heads"],
            head_dim,
            attributes.get("scale", head_dim**-0.5),  # not in graphs of earlier versions
            attributes.get("local_window_size", 0),
        )
        rotary = list(attention.input[7:9]) if attributes.get("do_rotary") else []
        return self.attend(self.output(qkv), heads, rotary)

    def attend(self, qkv: Output, heads: Heads, rotary: list[str]) -> Output:
        """Attention over the cache.

        Args:
            qkv: (B, T, W), queries, keys and values.
            rotary: names of cosines and sines, or empty.

        Returns:
            (B, T, n_head * head_dim).
        """
        raise NotImplementedError


class _PagedTranslator(Translator):
    def __init__(self, graph: onnx.GraphProto, cache_type: Type) -> None:
        super().__init__(graph)
        self.cache_type = cache_type
        for name in ("input_ids", "position_ids", "logits_index"):
            self.values[name] = self.input(name, Type.i64, 1, -1)
        self.layout = [self.input(name, Type.i32, -1) for name in LAYOUT]
        self.longest = self.input(MAX_CONTEXT_INPUT, Type.i32)

    def attend(self, qkv: Output, heads: Heads, rotary: list[str]) -> Output:
        rows = ops.squeeze(qkv, np.array([0]))  # (N, W)
        parts = ops.variadic_split(rows, np.int64(1), np.array(heads.widths)).outputs()
        if rotary:
            angles = []  # cosines and sines (N, 1, half) at the tokens' positions
            for name in rotary:
                table = self._array(name)
                positions = self.output("position_ids")
                at_tokens = ops.gather(ops.constant(table), positions, np.int64(0))
                shaped = ops.reshape(at_tokens, np.array([-1, 1, table.shape[1]]), False)
                angles.append(shaped.output(0))
            for i, x in enumerate(parts[:2]):  # queries and keys (N, heads * head_dim)
                by_head = ops.reshape(x, np.array([0, -1, heads.head_dim]), True).output(0)
                turned = rotated(by_head, heads.head_dim, *angles)
                width = x.get_partial_shape()[1].get_length()
                parts[i] = ops.reshape(turned, np.array([0, width]), True).output(0)
        shape = (-1, heads.n_kv_head, BLOCK_TOKENS, heads.head_dim)
        names = (f"{part}_cache.{heads.layer}" for part in ("key", "value"))
        caches = [self.input(name, self.cache_type, *shape) for name in names]
        of_kv = heads.n_kv_head, heads.head_dim
        mixed = paged_attention(
            parts, caches, self.layout, self.longest, of_kv, heads.scale, heads.window
        )
        return ops.unsqueeze(mixed, np.array([0])).output(0)


def _integers(data: Array, shape: list[int], kind: Type) -> Output:
    """Integers, packed if they have 4 bits, as float32."""
    data = np.ascontiguousarray(data).reshape(-1).view(np.int8)
    # Copied: a shared tensor does not keep `data` alive.
    constant = op.Constant(Tensor(data, Shape(shape), kind), shared_memory=False)
    return ops.convert(constant, "f32").output(0)


def is_lookup(node: onnx.NodeProto) -> bool:
    """Whether a node with group-quantized integers looks up rows rather than multiplying."""
    return bool(node.op_type == "GatherBlockQuantized")


def _branch_attention(node: onnx.NodeProto) -> onnx.NodeProto:
    """The attention of an ordinary step, in the branch of an `If`."""
    branch: onnx.GraphProto = _attributes(node)["else_branch"]
    attention: onnx.NodeProto = next(n for n in branch.node if n.op_type == "GroupQueryAttention")
    return attention


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def paged_attention(
    parts: Sequence[Output],
    caches: Sequence[Output],
    layout: Sequence[Output],
    longest: Output,
    shape: tuple[int, int],
    scale: float,
    window: int,
) -> Output:
    """Causal self-attention over packed sequences; appends their keys and values to the caches.

    Args:
        parts: queries, keys and values (N, heads * head_dim) of all new tokens.
        caches: of keys and of values (blocks, n_kv_head, BLOCK_TOKENS, head_dim).
        layout: int32 (sequences,), tokens that each sequence has; (sequences + 1,), where its new
            ones begin; (used blocks,), their numbers; (sequences + 1,), where a sequence's begin.
        longest: tokens of the longest sequence, with the new ones.
        shape: n_kv_head and head_dim.
        scale: factor of attention scores.
        window: number of tokens that a query attends to; 0: all.

    Returns:
        (N, n_head * head_dim).
    """

    def none(kind: type, *sizes: int) -> Output:
        return ops.constant(np.zeros(sizes, kind)).output(0)

    n_kv_head, head_dim = shape
    numbers = (ops.constant(x).output(0) for x in (np.float32(scale), np.int32(window)))
    no_slopes = none(np.float32, 0)
    operands = [*parts, *caches, *layout, *numbers, no_slopes, longest]
    # Inputs for cache eviction, rotation and sparsity, in the order in which the operator has them.
    operands += [none(np.int32, 0) for _ in range(3)]
    operands += [none(np.float32, 0), none(np.float32, 0), none(np.int32), none(np.int32)]
    operands += [none(np.float32, 0, 0, 0, 0), none(np.int32)]
    operands += [*(none(np.int32, 0) for _ in range(4)), none(np.uint8, 0), none(np.int32, 0)]
    # Not public: OpenVINO makes it itself of a model with a state, whose layout cannot be chosen.
    paged = op._PagedAttentionExtension(operands)
    for part in ("k", "v"):
        paged.get_rt_info()[f"num_{part}_heads"] = n_kv_head
        paged.get_rt_info()[f"{part}_head_size"] = head_dim
    width = parts[0].get_partial_shape()[1].get_length()
    return ops.reshape(paged.output(0), np.array([0, width]), True).output(0)


def rotated(x: Output, head_dim: int, cosines: Output, sines: Output) -> Output:
    """Queries or keys (..., heads, head_dim), the first features of every head rotated by angles
    (..., 1, half)."""
    half = cosines.get_partial_shape()[-1].get_length()
    sizes = np.array([half, half, head_dim - 2 * half])
    first, second, *rest = ops.variadic_split(
        x, np.int64(-1), sizes if sizes[2] else sizes[:2]
    ).outputs()
    turned = [
        ops.subtract(ops.multiply(first, cosines), ops.multiply(second, sines)).output(0),
        ops.add(ops.multiply(second, cosines), ops.multiply(first, sines)).output(0),
    ]
    return ops.concat([*turned, *rest], -1).output(0)
