"""An export's ONNX graph in OpenVINO's operators, with paged attention.

Every node is translated by itself, so that all families and formats of weights are, and the weights
stay the integers of the export. What differs from the ONNX graph:

- A step's tokens are packed, N tokens of S sequences one after another, batch 1; paged attention is
  told where sequences begin and in which blocks of the cache their keys and values lie. So the
  branch for mixed steps is not needed.
- Inputs of INT8 linears are rounded by a `FakeQuantize`, from which OpenVINO makes products of
  integers. Inputs of linears with scales in groups are rounded by OpenVINO's kernel itself, as
  onnxruntime's does (`DYNAMIC_QUANTIZATION_GROUP_SIZE`).

Source of paged attention: Kwon et al., SOSP 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from openvino import Model, Node, Output, PartialShape, Shape, Tensor, Type, op
from openvino import opset15 as ops

from lathe.serve.runtime.kv_cache import PagedCache
from lathe.serve.runtime.open_session import ROUNDED_INPUT
from lathe.serve.runtime.openvino_attention import paged_attention, rotated

LAYOUT = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
LONGEST = "max_context_len"
LEVELS = 256  # of an INT8 activation, around zero
SIGNS = {4: 0x88, 8: 0x80}  # by bits: turns unsigned integers into two's complements
Array = NDArray[Any]


@dataclass(frozen=True)
class Rounded:
    """x, to be rounded to multiples of a scale."""

    x: Output
    scale: Array


@dataclass(frozen=True)
class Integers:
    """A weight (in, out) in int8, with a scale for each column."""

    values: Array
    scale: Array


Value: TypeAlias = "Output | Array | Rounded | Integers"


def translate(path: Path, cache_type: Type) -> tuple[Model, int]:
    """The graph of an exported file.

    Args:
        cache_type: of keys and values.

    Returns:
        A model from `input_ids` and `position_ids` (1, N), `logits_index` (1, k), `LAYOUT` and
        `LONGEST` as OpenVINO's paged attention reads them, and `key_cache.i`, `value_cache.i` to
        `logits` (1, k, V); and the size of the groups in which inputs of integer weights are to be
        rounded, 0 where some of them stay in float.
    """
    translator = _Translator(onnx.load(path).graph, cache_type)
    model = translator.model()
    return model, min(translator.groups, default=0)


class _Translator:
    def __init__(self, graph: onnx.GraphProto, cache_type: Type) -> None:
        self.graph, self.cache_type = graph, cache_type
        self.inputs: list[Node] = []
        self.groups: set[int] = set()
        self.values: dict[str, Value] = {
            t.name: numpy_helper.to_array(t) for t in graph.initializer
        }
        for name in ("input_ids", "position_ids", "logits_index"):
            self.values[name] = self._input(name, Type.i64, 1, -1)
        self.layout = [self._input(name, Type.i32, -1) for name in LAYOUT]
        self.longest = self._input(LONGEST, Type.i32)
        dims = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
        self.cache_dims = {
            name: (d[1].dim_value, d[3].dim_value) for name, d in dims.items() if d[3:]
        }
        self.handlers: dict[str, Callable[[onnx.NodeProto], Value]] = {
            "Add": lambda node: ops.add(*self._given(node)).output(0),
            "Mul": self._multiply,
            "Sigmoid": lambda node: ops.sigmoid(*self._given(node)).output(0),
            "Gelu": self._gelu,
            "Relu": lambda node: ops.relu(*self._given(node)).output(0),
            "Gather": self._gather,
            "Pad": self._pad,
            "Range": lambda node: np.arange(*(int(self._array(name)) for name in node.input)),
            "Cos": lambda node: np.cos(self._array(node.input[0])),
            "Sin": lambda node: np.sin(self._array(node.input[0])),
            "GatherND": lambda node: ops.gather_nd(*self._given(node), 1).output(0),
            "Unsqueeze": self._unsqueeze,
            "Cast": self._cast,
            "Concat": self._concat,
            "Split": self._split,
            "Slice": self._slice,
            "Reshape": self._reshape,
            "Transpose": lambda node: self._array(node.input[0]).T,
            "LayerNormalization": self._layer_norm,
            "RMSNormalization": self._rms_norm,
            "QuantizeLinear": lambda node: Rounded(
                self._output(node.input[0]), self._array(node.input[1])
            ),
            "DequantizeLinear": self._dequantize,
            "MatMul": self._matmul,
            "MatMulNBits": self._matmul_grouped,
            "GatherBlockQuantized": self._gather_grouped,
            "If": self._attention,
        }

    def model(self) -> Model:
        for node in self._needed():
            self.values[node.output[0]] = self.handlers[node.op_type](node)
        result = ops.result(self._output("logits"))
        result.output(0).get_tensor().set_names({"logits"})
        return Model([result], self.inputs, "gpt")

    def _needed(self) -> list[onnx.NodeProto]:
        """The nodes that the logits depend on, without those that serve mixed steps only."""
        needed, nodes = {"logits"}, []
        for node in reversed(self.graph.node):
            if needed.isdisjoint(node.output):
                continue
            read = _attention_of(node) if node.op_type == "If" else node
            needed |= {name for name in read.input if name not in self.cache_dims}
            nodes.append(node)
        return nodes[::-1]

    def _input(self, name: str, kind: Type, *shape: int) -> Output:
        parameter = ops.parameter(PartialShape(list(shape)), kind, name=name)
        parameter.output(0).get_tensor().set_names({name})
        self.inputs.append(parameter)
        return parameter.output(0)

    def _array(self, name: str) -> Array:
        value = self.values[name]
        assert isinstance(value, np.ndarray), f"{name} is no constant"
        return value

    def _output(self, name: str) -> Output:
        value = self.values[name]
        if isinstance(value, np.ndarray):
            return ops.constant(value).output(0)
        assert isinstance(value, Output), f"{name} is a quantized tensor"
        return value

    def _given(self, node: onnx.NodeProto) -> list[Output]:
        return [self._output(name) for name in node.input]

    def _multiply(self, node: onnx.NodeProto) -> Value:
        first, second = (self.values[name] for name in node.input)
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
            product: Array = first * second
            return product
        return ops.multiply(*self._given(node)).output(0)

    def _unsqueeze(self, node: onnx.NodeProto) -> Value:
        x, axes = self.values[node.input[0]], self._array(node.input[1])
        if isinstance(x, np.ndarray):
            return np.expand_dims(x, tuple(axes))
        return ops.unsqueeze(*self._given(node)).output(0)

    def _cast(self, node: onnx.NodeProto) -> Value:
        x = self.values[node.input[0]]
        if isinstance(x, np.ndarray):
            return x.astype(np.float32)
        return ops.convert(self._output(node.input[0]), "f32").output(0)

    def _gelu(self, node: onnx.NodeProto) -> Output:
        exact = _attributes(node)["approximate"] == b"none"
        return ops.gelu(*self._given(node), "erf" if exact else "tanh").output(0)

    def _gather(self, node: onnx.NodeProto) -> Output:
        axis = np.int64(_attributes(node).get("axis", 0))
        return ops.gather(*self._given(node), axis).output(0)

    def _pad(self, node: onnx.NodeProto) -> Output:
        before, after = np.split(self._array(node.input[1]), 2)
        return ops.pad(
            self._output(node.input[0]), before, after, "constant", np.float32(0)
        ).output(0)

    def _concat(self, node: onnx.NodeProto) -> Output:
        return ops.concat(self._given(node), _attributes(node)["axis"]).output(0)

    def _split(self, node: onnx.NodeProto) -> Output:
        """The first part; notes the others, too."""
        x, axis = self._output(node.input[0]), np.int64(_attributes(node)["axis"])
        if node.input[1:]:
            parts = ops.variadic_split(x, axis, self._array(node.input[1])).outputs()
        else:
            parts = ops.split(x, axis, len(node.output)).outputs()
        self.values |= dict(zip(node.output, parts, strict=True))
        return parts[0]

    def _slice(self, node: onnx.NodeProto) -> Output:
        x, start, stop, axes = node.input
        bounds = self._array(start), self._array(stop), np.ones(1, np.int64)
        return ops.slice(self._output(x), *bounds, self._array(axes)).output(0)

    def _reshape(self, node: onnx.NodeProto) -> Value:
        x, shape = self.values[node.input[0]], self._array(node.input[1])
        if isinstance(x, np.ndarray):
            return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)])
        return ops.reshape(self._output(node.input[0]), shape, True).output(0)

    def _layer_norm(self, node: onnx.NodeProto) -> Output:
        x, weight, bias = self._given(node)
        epsilon = _attributes(node)["epsilon"]
        normal = ops.mvn(x, np.array([-1]), True, epsilon, "inside_sqrt")
        return ops.add(ops.multiply(normal, weight), bias).output(0)

    def _rms_norm(self, node: onnx.NodeProto) -> Output:
        x, weight = self._given(node)
        mean = ops.reduce_mean(ops.power(x, np.float32(2)), np.array([-1]), True)
        root = ops.sqrt(ops.add(mean, np.float32(_attributes(node)["epsilon"])))
        return ops.multiply(ops.divide(x, root), weight).output(0)

    def _dequantize(self, node: onnx.NodeProto) -> Value:
        value, scale = self.values[node.input[0]], self._array(node.input[1])
        if not isinstance(value, Rounded):
            return Integers(self._array(node.input[0]), scale)
        low, high = np.float32(-LEVELS / 2 * scale), np.float32((LEVELS / 2 - 1) * scale)
        return ops.fake_quantize(value.x, low, high, low, high, LEVELS).output(0)

    def _matmul(self, node: onnx.NodeProto) -> Output:
        x, weight = self._output(node.input[0]), self.values[node.input[1]]
        if isinstance(weight, Integers):
            if x.get_node().get_type_name() != "FakeQuantize":
                self.groups.add(0)
            integers = ops.constant(np.ascontiguousarray(weight.values.T))
            scaled = ops.multiply(ops.convert(integers, "f32"), weight.scale[:, None])
            return ops.matmul(x, scaled, False, True).output(0)
        matrix = np.ascontiguousarray(self._array(node.input[1]).T)
        return ops.matmul(x, ops.constant(matrix), False, True).output(0)

    def _matmul_grouped(self, node: onnx.NodeProto) -> Output:
        x, packed = self._output(node.input[0]), self._array(node.input[1])
        attributes = _attributes(node)
        bits, size = attributes["bits"], attributes["block_size"]
        n_out, n_groups, _ = packed.shape
        width = n_groups * size
        rounds = attributes["accuracy_level"] == ROUNDED_INPUT
        self.groups.add(size if rounds else 0)
        if added := width - attributes["K"]:
            ends = (np.array([0, 0, n]) for n in (0, added))
            x = ops.pad(x, *ends, "constant", np.float32(0)).output(0)
        data = np.ascontiguousarray(packed ^ SIGNS[bits]).reshape(-1)
        kind = Type.i4 if bits == 4 else Type.i8
        tensor = Tensor(data.view(np.int8), Shape([n_out, n_groups, size]), kind)
        # Copied: a shared tensor does not keep `data` alive.
        values = ops.convert(op.Constant(tensor, shared_memory=False), "f32")
        scale = self._array(node.input[2]).reshape(n_out, n_groups, 1)
        weight = ops.reshape(ops.multiply(values, scale), np.array([n_out, width]), False)
        product = ops.matmul(x, weight, False, True)
        if node.input[5:]:
            product = ops.add(product, self._output(node.input[5]))
        return product.output(0)

    def _gather_grouped(self, node: onnx.NodeProto) -> Output:
        """Embeddings of ids (1, N) from bytes (V, C * bits / 8)."""
        table, ids, first = self._array(node.input[0]), self._output(node.input[1]), np.int64(0)
        unsigned, bits = ops.gather(ops.constant(table), ids, first), _attributes(node)["bits"]
        if bits == 4:
            halves = (
                ops.bitwise_and(unsigned, np.uint8(15)),
                ops.bitwise_right_shift(unsigned, np.uint8(4)),
            )
            unsigned = ops.concat([ops.unsqueeze(half, np.int64(3)) for half in halves], 3)
        integers = ops.subtract(ops.convert(unsigned, "f32"), np.float32(2 ** (bits - 1)))
        scale = self._array(node.input[2]).reshape(len(table), -1, 1)
        groups = ops.reshape(integers, np.array([0, 0, scale.shape[1], -1]), True)
        scales = ops.gather(ops.constant(scale), ids, first)
        return ops.reshape(ops.multiply(groups, scales), np.array([0, 0, -1]), True).output(0)

    def _attention(self, node: onnx.NodeProto) -> Output:
        attention = _attention_of(node)
        attributes, (qkv, _, _, key_cache, *_) = _attributes(attention), attention.input
        n_head, n_kv_head = attributes["num_heads"], attributes["kv_num_heads"]
        head_dim, layer = self.cache_dims[key_cache][1], key_cache.rpartition("_")[2]
        widths = [n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim]
        rows = ops.squeeze(self._output(qkv), np.array([0]))  # (N, W)
        parts = ops.variadic_split(rows, np.int64(1), np.array(widths)).outputs()
        if attributes.get("do_rotary"):
            cosines, sines = (self._rotation(name) for name in attention.input[7:9])
            parts[:2] = (rotated(part, head_dim, cosines, sines) for part in parts[:2])
        shape = (-1, n_kv_head, PagedCache.BLOCK, head_dim)
        names = (f"{part}_cache.{layer}" for part in ("key", "value"))
        caches = [self._input(name, self.cache_type, *shape) for name in names]
        scale = attributes.get("scale", head_dim**-0.5)  # not in graphs of earlier versions
        window = attributes.get("local_window_size", 0)
        mixed = paged_attention(
            parts, caches, self.layout, self.longest, (n_kv_head, head_dim), scale, window
        )
        return ops.unsqueeze(mixed, np.array([0])).output(0)

    def _rotation(self, name: str) -> Output:
        """Cosines or sines (N, 1, half) at the tokens' positions."""
        found = ops.gather(
            ops.constant(self._array(name)), self._output("position_ids"), np.int64(0)
        )
        return ops.reshape(found, np.array([-1, 1, self._array(name).shape[1]]), False).output(0)


def _attention_of(node: onnx.NodeProto) -> onnx.NodeProto:
    """The attention of an ordinary step, in the branch of an `If`."""
    branch: onnx.GraphProto = _attributes(node)["else_branch"]
    found: onnx.NodeProto = next(n for n in branch.node if n.op_type == "GroupQueryAttention")
    return found


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
