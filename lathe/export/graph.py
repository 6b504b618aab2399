"""An ONNX graph built node by node, with linears in float32, float16, QDQ int8, or in groups.

Integer linears are `MatMul(DequantizeLinear(uint8 x), DequantizeLinear(int8 w))`, which onnxruntime
fuses to `MatMulIntegerToFloat`. Activations are uint8 and weights int8 because only that pair has
fast kernels on x86 (int8 x int8 falls back to a path an order of magnitude slower). No optimizer
needs to be disabled for it: SkipLayerNormFusion fuses one sum of this graph, the last, which
changes neither the speed nor, in int8, a bit of the logits.

A linear whose input the plan leaves in float is `MatMul(x, DequantizeLinear(int8 w))`, which
onnxruntime fuses to `MatMulNBits` of 8 bits (the head's is not fused). `open_session` makes it
compute in float32: by default it rounds x to int8.

A linear whose weight has scales in groups (INT4, dynamic INT8) is one `MatMulNBits` with its bias;
see `lathe.export.grouped`.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lathe.export import grouped
from lathe.export.attention import MICROSOFT, PARTS, mixed_inputs, padded_head
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import INT8, QuantizationPlan, WeightFormat
from lathe.model.rope import Rope
from lathe_serving.runtime.exported_model import PREFIX_LENGTH

ACTIVATION_ZERO_POINT = 128
Weight = NDArray[np.float32] | NDArray[np.float16]


def quantize_weight(
    weight: Weight,
    axis: int,
    fmt: WeightFormat = INT8,
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize a matrix to symmetric int8, with one scale for every index of `axis`.

    Returns q and scale (n,), weight ~ q * scale; scale is absmax / 127, for `abs_max` the same
    value n times.
    """
    levels = fmt.levels
    absmax = np.maximum(weight.max(axis=1 - axis), -weight.min(axis=1 - axis))
    if fmt.quantize_type == "abs_max":
        absmax = np.full_like(absmax, absmax.max())
    scale = np.where(absmax > 0, absmax, 1).astype(np.float32) / np.float32(levels)
    q = weight / np.expand_dims(scale, 1 - axis)
    np.clip(np.rint(q, out=q), -levels, levels, out=q)
    return q.astype(np.int8), scale


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
        self.made: dict[str, NDArray[Any]] = {}  # constants and quantized weights
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
        made = [f"{name}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name=name, **attributes))
        return made

    def declare(self, name: str, *shape: int | str | None) -> None:
        """Declare the shape of a result that the checker cannot infer."""
        self.declared.append(_value(name, self.dtype, *shape))

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; returns its name."""
        self.made.setdefault(name, value)
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

    def embedding(self, tokens: str) -> str:
        """Token embeddings (B, T, C) of ids (B, T)."""
        if not (self.plan and self.plan.quantize_embedding):
            return self.op("Gather", self.weight(f"{self.tables[0]}.weight"), tokens)
        if self.plan.linears[HEAD].weight.group_size:
            return self._grouped_embedding(tokens)
        fmt = self.plan.linears[HEAD].weight
        return self._int8_rows(f"{self.tables[0]}.weight", tokens, fmt)

    def positions(self, ids: str) -> str:
        """Learned position embeddings (B, T, C) of positions (B, T)."""
        table = self.config.architecture.embeddings[1]
        if offset := self.config.architecture.position_offset:
            ids = self.op("Add", ids, self.constant("position_offset", np.array(offset)))
        if self.plan and self.plan.position_embedding:
            return self._int8_rows(f"{table}.weight", ids, INT8)
        return self.op("Gather", self.weight(f"{table}.weight"), ids)

    def head(self, x: str) -> None:
        """The output projection: logits (B, k, V) at the requested positions."""
        weights = f"{self.tables[-1]}.weight"
        if not (self.plan and self.plan.quantize_embedding):
            transposed = self.op("Transpose", self.weight(weights), perm=[1, 0])
            if self.dtype == TensorProto.FLOAT:
                self.op("MatMul", x, transposed, name="logits")
            else:
                product = self.op("MatMul", x, transposed)
                self.op("Cast", product, to=TensorProto.FLOAT, name="logits")
            return
        if self.plan.linears[HEAD].weight.group_size:
            self._grouped(HEAD, x, weights, "logits")
            return
        table, scale = self._int8_table(weights, self.plan.linears[HEAD].weight)
        # Transposed while still int8: a Transpose after DequantizeLinear would hide the integer
        # weight from onnxruntime's fusion.
        transposed = self.op("Transpose", table, perm=[1, 0])
        zero_points = self._zero_points(HEAD, self.made[scale])
        weight = self.op("DequantizeLinear", transposed, scale, *zero_points, axis=1)
        self.op("MatMul", self._rounded(HEAD, x), weight, name="logits")

    def linear(self, name: str, x: str) -> str:
        """A linear of x, quantized according to the plan."""
        weight, spec = f"{name}.weight", self.config.architecture.find_linear(name)
        is_biased = spec is not None and spec.name in self.config.biased
        bias = self.weight(f"{name}.bias") if is_biased else ""
        if not (self.plan and name in self.plan.linears):
            return self._product(name, x, self.weight(weight), bias)
        fmt = self.plan.linears[name].weight
        if fmt.group_size:
            return self._grouped(name, x, weight, name, bias)
        q, scale = quantize_weight(self.weights[weight], 1, fmt)
        dequantized = self.op(
            "DequantizeLinear",
            self.constant(weight, q),
            self.constant(f"{weight}_scale", scale),
            *self._zero_points(name, scale),
            axis=1,
        )
        return self._product(name, self._rounded(name, x), dequantized, bias)

    def _product(self, name: str, x: str, weight: str, bias: str) -> str:
        if not bias:
            return self.op("MatMul", x, weight, name=name)
        return self.op("Add", self.op("MatMul", x, weight, name=f"{name}.matmul"), bias, name=name)

    def _zero_points(self, linear: str, scale: NDArray[np.float32]) -> list[str]:
        """The zero points of a weight whose input is in float. Without them onnxruntime fails on
        x86 CPUs without VNNI, where it converts such weights to uint8 (see `open_session`)."""
        assert self.plan is not None
        if self.plan.linears[linear].activation is not None:
            return []
        return [self.constant(f"{linear}.zero_points", np.zeros(scale.shape, np.int8))]

    def _rounded(self, linear: str, x: str) -> str:
        """x rounded to the uint8 grid of the linear's input, or unchanged if that is float."""
        assert self.plan is not None
        fmt = self.plan.linears[linear]
        if fmt.activation is None:
            return x
        grid = (
            self.constant(f"{linear}.scale", np.array(fmt.activation_scale, np.float32)),
            self.constant("zero_point", np.array(ACTIVATION_ZERO_POINT, np.uint8)),
        )
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, *grid), *grid)

    def _grouped(self, linear: str, x: str, weight: str, output: str, bias: str = "") -> str:
        """A linear of x whose weight has group scales."""
        assert self.plan is not None
        packed, scale = self._packed(linear, weight)
        shape = self.weights[weight].shape
        n_out, n_in = shape if linear == HEAD else shape[::-1]
        fmt = self.plan.linears[linear]
        self.nodes.append(grouped.linear_node((x, packed, scale), bias, output, (n_out, n_in), fmt))
        if linear != HEAD:
            self.declare(output, None, None, n_out)
        return output

    def _packed(self, linear: str, weight: str) -> tuple[str, str]:
        """Names of a weight's bytes and scales."""
        assert self.plan is not None
        scale = f"{weight}_scale"
        if weight not in self.made:
            matrix = self.weights[weight] if linear == HEAD else self.weights[weight].T
            fmt = self.plan.linears[linear].weight
            self.made[weight], self.made[scale] = grouped.pack(np.ascontiguousarray(matrix), fmt)
        return weight, scale

    def _grouped_embedding(self, tokens: str) -> str:
        """Token embeddings (B, T, C) from the bytes of the head."""
        assert self.plan is not None
        embedding = self.tables[0]
        packed, scale = self._packed(HEAD, f"{embedding}.weight")
        rows = self.op("Reshape", packed, self.constant("rows", np.array([0, -1], np.int64)))
        fmt = self.plan.linears[HEAD]
        padded = 8 // fmt.weight.bits * math.prod(self.made[packed].shape[1:])
        self.nodes.append(grouped.embedding_node((rows, tokens, scale), embedding, fmt))
        self.declare(embedding, None, None, padded)
        width = self.weights[f"{embedding}.weight"].shape[1]
        if width == padded:
            return embedding
        bounds = [np.array([bound], np.int64) for bound in (0, width, -1)]
        names = ("first_feature", "n_features", "last_axis")
        return self.op("Slice", embedding, *map(self.constant, names, bounds))

    def _int8_rows(self, table: str, ids: str, fmt: WeightFormat) -> str:
        """Embeddings (B, T, C) of ids (B, T) from a table with one scale per row."""
        table, scale = self._int8_table(table, fmt)
        rows = self.op("Cast", self.op("Gather", table, ids), to=TensorProto.FLOAT)
        last = self.constant("last_axis", np.array([-1], np.int64))
        return self.op("Mul", rows, self.op("Unsqueeze", self.op("Gather", scale, ids), last))

    def _int8_table(self, table: str, fmt: WeightFormat) -> tuple[str, str]:
        """Names of a table's INT8 values and of its scales."""
        scale = f"{table}_scale"
        if table not in self.made:
            self.made[table], self.made[scale] = quantize_weight(self.weights[table], 0, fmt)
        return table, scale

    @property
    def n_bytes(self) -> int:
        """Size of the initializers."""
        return sum(value.nbytes for _, value in self.initializers())

    def initializers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """All initializers with their values."""
        yield from self.made.items()
        for name in sorted(self.kept):
            yield name, self.weights[name]

    def save(self, path: Path) -> None:
        """Write the file, one initializer at a time: concatenated protobuf messages are read as one
        merged message."""
        with path.open("wb") as file:
            file.write(self.model.SerializeToString())
            for name, value in self.initializers():
                part = onnx.ModelProto()
                part.graph.initializer.add(
                    name=name,
                    dims=value.shape,
                    data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
                    raw_data=numpy_helper.tobytes_little_endian(value),
                )
                file.write(part.SerializeToString())

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
        for rows, prefix in (("rows", ""), (1, "chunk_")):
            size = padded_head(config).size
            for (i, n_head), part in product(enumerate(config.n_kv_head), PARTS):
                past = (rows, n_head, f"{prefix}past", size)
                present = (rows, n_head, f"{prefix}total", size)
                inputs.append(_value(f"{prefix}past_{part}_{i}", self.dtype, *past))
                outputs.append(_value(f"{prefix}present_{part}_{i}", self.dtype, *present))
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
