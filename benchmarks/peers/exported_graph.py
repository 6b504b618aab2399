"""An export of Lathe as a graph of OpenVINO with paged attention: its own integers and scales."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from openvino import Model, Node, Output, PartialShape, Shape, Tensor, Type, op, opset15

EPSILON = 1e-5
BLOCK = 32  # tokens of a block of keys and values on the CPU
HEAD = "lm_head"
LEVELS = 256  # of an INT8 activation, around zero
SIGNS = 0x88  # turns two numbers plus 8 into two's complements
Value = Node | Output
Weights = dict[str, NDArray[Any]]


def read_weights(model: Path) -> Weights:
    """The initializers of an exported graph by name."""
    graph = onnx.load(model).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


class Graph:
    """Inputs are packed: N tokens of S sequences, one after another.

    Args:
        rounds: whether the inputs of integer weights are rounded as the export says; those of INT8
            to one grid, which lets OpenVINO multiply in integers, those of INT4 in groups, by
            operators of their own.
    """

    def __init__(self, weights: Weights, n_head: list[int], head_dim: int, rounds: bool) -> None:
        self.w, self.n_head, self.head_dim, self.rounds = weights, n_head, head_dim, rounds
        self.inputs: list[Node] = []

    def model(self) -> Model:
        """`input_ids` and `position_ids` (N,), how sequences lie in blocks as OpenVINO's paged
        attention reads it, `logits_index` (k,), and the blocks -> `logits` (k, V)."""
        ids = self.input("input_ids", Type.i64, -1)
        places = self.input("position_ids", Type.i64, -1)
        index = self.input("logits_index", Type.i64, -1)
        names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        self.layout = [self.input(name, Type.i32, -1) for name in names]
        self.longest = self.input("max_context_len", Type.i32)
        x = opset15.add(self.rows("wte.weight", ids), self.rows("wpe.weight", places))
        for i, n_head in enumerate(self.n_head):
            mixed = self.attention(i, self.norm(f"h.{i}.ln_1", x), n_head)
            if i == len(self.n_head) - 1:
                x, mixed = (opset15.gather(part, index, np.int64(0)) for part in (x, mixed))
            x = opset15.add(x, self.linear(f"h.{i}.attn.c_proj", mixed))
            inner = self.linear(f"h.{i}.mlp.c_fc", self.norm(f"h.{i}.ln_2", x))
            inner = opset15.gelu(inner, "tanh")
            x = opset15.add(x, self.linear(f"h.{i}.mlp.c_proj", inner))
        result = opset15.result(self.product(HEAD, "wte.weight", self.norm("ln_f", x)))
        result.output(0).get_tensor().set_names({"logits"})
        return Model([result], self.inputs, "gpt")

    def input(self, name: str, kind: Type, *shape: int) -> Node:
        parameter = opset15.parameter(PartialShape(list(shape)), kind, name=name)
        parameter.output(0).get_tensor().set_names({name})
        self.inputs.append(parameter)
        return parameter

    def norm(self, name: str, x: Value) -> Node:
        normal = opset15.mvn(x, np.array([-1]), True, EPSILON, "inside_sqrt")
        scaled = opset15.multiply(normal, self.w[f"{name}.weight"])
        return opset15.add(scaled, self.w[f"{name}.bias"])

    def linear(self, name: str, x: Value) -> Node:
        return opset15.add(self.product(name, f"{name}.weight", x), self.w[f"{name}.bias"])

    def product(self, name: str, weight: str, x: Value) -> Node:
        """x times a weight in any of the export's formats."""
        values, scale = self.w[weight], self.w.get(f"{weight}_scale")
        is_table = weight == "wte.weight"
        if scale is not None and values.ndim == 3:
            return opset15.matmul(self.rounded_groups(x, values), self.int4(weight), False, True)
        matrix = opset15.constant(values if is_table else np.ascontiguousarray(values.T))
        if scale is not None:
            matrix = opset15.multiply(opset15.convert(matrix, "f32"), scale[:, None])
            x = self.rounded(name, x)
        return opset15.matmul(x, matrix, False, True)

    def rounded(self, name: str, x: Value) -> Value:
        if not self.rounds:
            return x
        scale = float(self.w[f"{name}.scale"])
        ends = np.float32(-LEVELS / 2 * scale), np.float32((LEVELS / 2 - 1) * scale)
        return opset15.fake_quantize(x, *ends, *ends, LEVELS)

    def rounded_groups(self, x: Value, packed: NDArray[np.uint8]) -> Value:
        """x in 8 bits, with a scale for each of the weight's groups."""
        if not self.rounds:
            return x
        groups = opset15.reshape(x, np.array([0, packed.shape[1], -1]), True)
        largest = opset15.reduce_max(opset15.abs(groups), np.array([-1]), True)
        largest = opset15.maximum(largest, np.float32(1e-30))
        scale = opset15.multiply(largest, np.float32(1 / (LEVELS / 2 - 1)))
        levels = opset15.round(opset15.divide(groups, scale), "half_to_even")
        return opset15.reshape(opset15.multiply(levels, scale), np.array([0, -1]), True)

    def int4(self, weight: str) -> Node:
        """(out, in) of the export's bytes (out, groups, size / 2)."""
        packed, scale = self.w[weight], self.w[f"{weight}_scale"]
        n_out, n_groups, size = packed.shape
        data = np.ascontiguousarray(packed ^ SIGNS).reshape(-1)
        tensor = Tensor(data, Shape([n_out, n_groups, 2 * size]), Type.i4)
        # Copied: a shared tensor does not keep `data` alive.
        values = opset15.convert(op.Constant(tensor, shared_memory=False), "f32")
        scaled = opset15.multiply(values, scale.reshape(n_out, n_groups, 1))
        return opset15.reshape(scaled, np.array([n_out, -1]), False)

    def rows(self, table: str, ids: Value) -> Node:
        """Rows of an embedding in any of the export's formats."""
        values, scale, first = self.w[table], self.w.get(f"{table}_scale"), np.int64(0)
        if scale is None:
            return opset15.gather(opset15.constant(values), ids, first)
        if values.ndim == 2:
            found = opset15.gather(opset15.constant(values), ids, first)
            scales = opset15.gather(opset15.constant(scale[:, None]), ids, first)
            return opset15.multiply(opset15.convert(found, "f32"), scales)
        n, n_groups, size = values.shape
        packed = opset15.gather(opset15.constant(values.reshape(n, -1)), ids, first)
        halves = (
            opset15.bitwise_and(packed, np.uint8(15)),
            opset15.bitwise_right_shift(packed, np.uint8(4)),
        )
        integers = opset15.concat([opset15.unsqueeze(half, np.int64(2)) for half in halves], 2)
        integers = opset15.subtract(opset15.convert(integers, "f32"), np.float32(8))
        groups = opset15.reshape(integers, np.array([0, n_groups, 2 * size]), True)
        scales = opset15.gather(opset15.constant(scale.reshape(n, n_groups, 1)), ids, first)
        return opset15.reshape(opset15.multiply(groups, scales), np.array([0, -1]), True)

    def attention(self, i: int, x: Value, n_head: int) -> Node:
        width = n_head * self.head_dim
        qkv = self.linear(f"h.{i}.attn.c_attn", x)
        parts = opset15.variadic_split(qkv, np.int64(1), np.array([width] * 3)).outputs()
        shape = (-1, n_head, BLOCK, self.head_dim)
        caches = [self.input(f"{part}_cache.{i}", Type.f32, *shape) for part in ("key", "value")]
        scale = opset15.constant(np.float32(self.head_dim**-0.5))
        given = [*caches, *self.layout, scale, _none(np.int32), _none(np.float32, 0), self.longest]
        outputs = [node.output(0) for node in [*given, *_unused()]]
        attention = op._PagedAttentionExtension([*parts, *outputs])
        for part in ("k", "v"):
            attention.get_rt_info()[f"num_{part}_heads"] = n_head
            attention.get_rt_info()[f"{part}_head_size"] = self.head_dim
        return opset15.reshape(attention.output(0), np.array([0, width]), True)


def _unused() -> list[Node]:
    """Inputs of paged attention that eviction, rotation and sparsity of the cache would need."""
    empty = [_none(np.int32, 0) for _ in range(3)]
    sparse = [*(_none(np.float32, 0) for _ in range(2)), *(_none(np.int32) for _ in range(2))]
    more = [_none(np.float32, 0, 0, 0, 0), _none(np.int32), *(_none(np.int32, 0) for _ in range(4))]
    return [*empty, *sparse, *more, _none(np.uint8, 0), _none(np.int32, 0)]


def _none(kind: type, *shape: int) -> Node:
    return opset15.constant(np.zeros(shape, kind))
