"""Corrects paddle2onnx's graph: the model's GELU, int8 weights, and the head's quantization.

paddle2onnx 1.2.6 writes the erf GELU instead of the tanh one, keeps int8 weights as floats before a
QuantizeLinear, and loses the fake quantization of an embedding and of a head that is its transpose.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import paddle2onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from lathe.model.quantization import INT8
from lathe_base.errors import StageError

OPSET = 13


def convert(static: Path, head_scale: float | None, table: NDArray[np.float32] | None) -> Any:
    """The ONNX model of a static Paddle model.

    Args:
        static: path of the `.pdmodel` without its suffix; the embedding and the head are float.
        head_scale: scale of the head's input, if that is quantized.
        table: the embedding (V, C) on its int8 grid, one scale per row, if it is quantized.

    Raises:
        StageError: the result is not a valid graph.
    """
    text = paddle2onnx.export(
        f"{static}.pdmodel", f"{static}.pdiparams", opset_version=OPSET, verbose=False
    )
    graph = _Graph(onnx.load_from_string(text))
    graph.fix_gelu()
    graph.fold_weights()
    if table is not None:
        graph.quantize_table(table)
    if head_scale is not None:
        graph.quantize_head(head_scale)
    return graph.finish()


def count_quantized(model: Any) -> int:
    """MatMuls whose two inputs are both dequantized integers."""
    made = {name: node for node in model.graph.node for name in node.output}

    def is_integer(name: str) -> bool:
        while name in made and made[name].op_type in ("Transpose", "Identity"):
            name = made[name].input[0]
        return name in made and made[name].op_type == "DequantizeLinear"

    matmuls = [node for node in model.graph.node if node.op_type == "MatMul"]
    return sum(all(map(is_integer, node.input)) for node in matmuls)


class _Graph:
    """Nodes in order, and the constants among their inputs as arrays."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes = [n for n in model.graph.node if n.op_type != "Constant"]
        self.constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)

    def fix_gelu(self) -> None:
        """0.5 x (1 + erf(x / sqrt 2)) -> 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
        made = {name: node for node in self.nodes for name in node.output}
        for node in [n for n in self.nodes if n.op_type == "Erf"]:
            x, argument = made[node.input[0]].input[0], node.output[0]
            inner = [
                ("Mul", [x, x], "square"),
                ("Mul", [f"{argument}.square", self._scalar(0.044715)], "scaled"),
                ("Add", [f"{argument}.scaled", self._scalar(1.0)], "sum"),
                ("Mul", [f"{argument}.sum", x], "cubic"),
                ("Mul", [f"{argument}.cubic", self._scalar((2 / np.pi) ** 0.5)], "argument"),
            ]
            mended = [
                helper.make_node(op, inputs, [f"{argument}.{name}"]) for op, inputs, name in inner
            ]
            mended.append(helper.make_node("Tanh", [f"{argument}.argument"], [argument]))
            self._replace(node, mended)

    def fold_weights(self) -> None:
        """QuantizeLinear of a constant -> its integers."""
        for node in [n for n in self.nodes if n.op_type == "QuantizeLinear"]:
            if node.input[0] not in self.constants:
                continue
            weight, scale = (self.constants[name] for name in node.input[:2])
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            if scale.size > 1:
                scale = scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
            integers = np.clip(np.rint(weight / scale), -INT8.levels, INT8.levels).astype(np.int8)
            self.constants[node.output[0]] = integers
            self.nodes.remove(node)

    def quantize_table(self, table: NDArray[np.float32]) -> None:
        """The float embedding -> DequantizeLinear of integers, one scale per row."""
        name = next(n for n, array in self.constants.items() if array.shape == table.shape)
        scale = np.abs(table).max(1) / INT8.levels
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        self.constants |= {
            f"{name}.int8": np.rint(self.constants.pop(name) / scale[:, None]).astype(np.int8),
            f"{name}.scale": scale,
            f"{name}.zero": np.zeros(len(table), np.int8),
        }
        inputs = [f"{name}.{part}" for part in ("int8", "scale", "zero")]
        self.nodes.insert(0, helper.make_node("DequantizeLinear", inputs, [name], axis=0))

    def quantize_head(self, scale: float) -> None:
        """Quantize the input of the last MatMul to int8 and back."""
        head = [node for node in self.nodes if node.op_type == "MatMul"][-1]
        x = head.input[0]
        step, zero = self._scalar(scale), self._constant("head.zero", np.zeros((), np.int8))
        at = self.nodes.index(head)
        self.nodes[at:at] = [
            helper.make_node("QuantizeLinear", [x, step, zero], [f"{x}.int8"]),
            helper.make_node("DequantizeLinear", [f"{x}.int8", step, zero], [f"{x}.read"]),
        ]
        head.input[0] = f"{x}.read"

    def finish(self) -> Any:
        """The model with these nodes and the constants that they use, checked.

        Raises:
            StageError: it is not a valid graph.
        """
        used = {name for node in self.nodes for name in node.input}
        graph = self.model.graph
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(
            numpy_helper.from_array(array, name)
            for name, array in self.constants.items()
            if name in used
        )
        try:
            onnx.checker.check_model(self.model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise StageError(f"paddle2onnx's graph is not valid: {error}") from error
        return self.model

    def _scalar(self, value: float) -> str:
        return self._constant(f"scalar.{value!r}", np.array(value, np.float32))

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        self.constants[name] = value
        return name

    def _replace(self, node: Any, others: list[Any]) -> None:
        at = self.nodes.index(node)
        self.nodes[at : at + 1] = others
