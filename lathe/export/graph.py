"""An ONNX graph built node by node; `lathe.export.weight_formats` adds quantized linears."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lathe.export.attention import MICROSOFT, PARTS, mixed_inputs, padded_head
from lathe.model.architecture import Rope
from lathe.model.config import GPTConfig
from lathe.model.quantization import QuantizationPlan
from lathe_serving.runtime.exported_model import PREFIX_LENGTH

Weight = NDArray[np.float32] | NDArray[np.float16]


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
