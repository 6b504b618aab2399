"""A model built from OpenVINO's operators, with keys and values as states of the graph."""

from typing import TypeAlias

import numpy as np
from openvino import Model, Node, Output, PartialShape, Type, opset13
from openvino.op.util import Variable, VariableInfo

from peers.weights import Array, Block, Matrix, Norm, Weights

Value: TypeAlias = Node | Output


def build(w: Weights, chosen: bool) -> Model:
    """Build the graph, with inputs named as in OpenVINO GenAI.

    Inputs are `input_ids`, `attention_mask` and `position_ids` (B, T), and `beam_idx` (B,); the
    output is `logits` (B, T, V).

    Args:
        chosen: add an input `first` (1,), the first position with logits.
    """
    return _Graph(w).model(chosen)


class _Graph:
    """Builds the graph.

    Operators have the order and form of OpenVINO's own conversions, which its optimizer recognizes
    as rotary embedding, RMSNorm and grouped-query attention.
    """

    def __init__(self, w: Weights) -> None:
        self.w = w
        self.sinks: list[Node] = []
        self.variables: list[Variable] = []
        self.ids = _input("input_ids", Type.i64, [-1, -1])
        self.known = _input("attention_mask", Type.i64, [-1, -1])
        self.positions = _input("position_ids", Type.i64, [-1, -1])
        self.beams = _input("beam_idx", Type.i32, [-1])
        self.angles = None if w.theta is None else self.rotation(w.theta)

    def model(self, chosen: bool) -> Model:
        w, zero = self.w, np.int64(0)
        table = opset13.constant(w.table, name="embedding")
        x = opset13.gather(table, opset13.convert(self.ids, "i32"), zero)
        if w.positions is not None:
            places = opset13.convert(self.positions, "i32")
            learned = opset13.constant(w.positions, name="positions")
            x = opset13.add(x, opset13.gather(learned, places, zero))
        mask = self.mask()
        for i in range(w.n_layer):
            block = w.block(i)
            x = opset13.add(x, self.attention(i, block, self.norm(block.attention_norm, x), mask))
            x = opset13.add(x, self.ffn(i, block, self.norm(block.ffn_norm, x)))
        inputs = [self.ids, self.known, self.positions, self.beams]
        if chosen:
            inputs.append(first := _input("first", Type.i64, [1]))
            x = opset13.slice(x, first, np.array([2**31]), np.array([1]), np.array([1]))
        x = self.norm(w.final_norm, x)
        result = opset13.result(opset13.matmul(x, table, False, True, name="head"))
        result.output(0).get_tensor().set_names({"logits"})
        return Model([result], self.sinks, inputs, self.variables, "gpt")

    def norm(self, norm: Norm, x: Value) -> Node:
        epsilon = self.w.epsilon
        if norm.bias is not None:
            normal = opset13.mvn(x, np.array([-1]), True, epsilon, "inside_sqrt")
            return opset13.add(opset13.multiply(normal, norm.weight), norm.bias)
        square = opset13.reduce_mean(opset13.power(x, np.float32(2)), np.array([-1]), True)
        root = opset13.sqrt(opset13.add(square, np.float32(epsilon)))
        normal = opset13.multiply(x, opset13.divide(np.float32(1), root))
        return opset13.multiply(norm.weight, normal)

    def linear(self, name: str, matrix: Matrix, x: Value) -> Node:
        weight = opset13.constant(matrix.weight, name=f"{name}.weight")
        product = opset13.matmul(x, weight, False, True, name=name)
        return product if matrix.bias is None else opset13.add(product, matrix.bias)

    def ffn(self, i: int, block: Block, x: Value) -> Node:
        inner = self.linear(f"{i}.up", block.up, x)
        if block.gate is None:
            inner = opset13.gelu(inner, "tanh")
        else:
            gate = opset13.swish(self.linear(f"{i}.gate", block.gate, x))
            inner = opset13.multiply(gate, inner)
        return self.linear(f"{i}.down", block.down, inner)

    def mask(self) -> Node:
        """Attention mask (B, 1, T, S), true where a token may attend to another."""
        length = _size(self.ids, 1)
        total = _size(self.known, 1)
        columns = _range(np.int64(0), total)
        rows = opset13.unsqueeze(_range(opset13.subtract(total, length), total), np.int64(1))
        causal = opset13.less_equal(columns, rows)
        known = opset13.not_equal(self.known, np.int64(0))
        known = opset13.unsqueeze(known, np.array([1, 2]))
        return opset13.logical_and(causal, known)

    def rotation(self, theta: float) -> tuple[Node, Node]:
        """Cosines and sines (B, 1, T, size) of the positions."""
        size = self.w.head_dim
        shares = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        steps: Array = np.float32(1) / np.float32(theta) ** shares
        places = opset13.unsqueeze(opset13.convert(self.positions, "f32"), np.int64(1))
        angles = opset13.matmul(steps[None, :, None], places, False, False)
        angles = opset13.transpose(angles, np.array([0, 2, 1]))
        angles = opset13.concat([angles, angles], -1)
        cosines, sines = opset13.cos(angles), opset13.sin(angles)
        one = np.int64(1)
        return opset13.unsqueeze(cosines, one), opset13.unsqueeze(sines, one)

    def rotated(self, x: Value) -> Value:
        """Apply the rotary embedding, if any, to x (B, heads, T, size)."""
        if self.angles is None:
            return x
        cosines, sines = self.angles
        half = self.w.head_dim // 2
        first, last = opset13.variadic_split(x, np.int64(-1), np.array([half, half])).outputs()
        turned = opset13.concat([opset13.multiply(last, np.float32(-1)), first], -1)
        return opset13.add(opset13.multiply(x, cosines), opset13.multiply(turned, sines))

    def attention(self, i: int, block: Block, x: Value, mask: Value) -> Node:
        w = self.w
        matrices, heads = [block.query, block.key, block.value], [w.n_head, *[w.n_kv_head] * 2]
        sizes = w.head_dim * np.array(heads)
        qkv = self.linear(f"{i}.qkv", Matrix.joined(matrices), x)
        parts = opset13.variadic_split(qkv, np.int64(2), sizes).outputs()
        query, key, value = (self.by_head(*part) for part in zip(parts, heads, strict=True))
        keys = self.for_each_query(self.cached(f"{i}.key", self.rotated(key)))
        values = self.for_each_query(self.cached(f"{i}.value", value))
        query = self.rotated(query)
        mixed = opset13.scaled_dot_product_attention(query, keys, values, mask)
        rows = opset13.transpose(mixed, np.array([0, 2, 1, 3]))
        joined = opset13.reshape(rows, np.array([0, 0, w.n_head * w.head_dim]), True)
        return self.linear(f"{i}.out", block.out, joined)

    def by_head(self, x: Value, heads: int) -> Node:
        """Split heads: (B, T, C) -> (B, heads, T, size)."""
        split = opset13.reshape(x, np.array([0, 0, heads, self.w.head_dim]), True)
        return opset13.transpose(split, np.array([0, 2, 1, 3]))

    def for_each_query(self, x: Value) -> Value:
        """Repeat key-value heads: (B, key-value heads, S, size) -> (B, heads, S, size)."""
        w = self.w
        if w.n_kv_head == w.n_head:
            return x
        shape = np.array([1, 1, w.n_head // w.n_kv_head, 1, 1])
        wide = opset13.broadcast(
            opset13.unsqueeze(x, np.int64(2)), shape, broadcast_spec="BIDIRECTIONAL"
        )
        return opset13.reshape(wide, np.array([0, w.n_head, -1, w.head_dim]), True)

    def cached(self, name: str, x: Value) -> Node:
        """Append x to the state; returns the new state."""
        heads, size = self.w.n_kv_head, self.w.head_dim
        info = VariableInfo()
        info.data_shape, info.data_type = PartialShape([-1, heads, -1, size]), Type.f32
        info.variable_id = name
        variable = Variable(info)
        rows = opset13.unsqueeze(_size(self.ids, 0), np.int64(0))
        empty = opset13.concat([rows, np.array([heads, 0, size])], 0)
        past = opset13.read_value(opset13.broadcast(np.float32(0), empty), variable)
        past = opset13.gather(past, self.beams, np.int64(0))
        present = opset13.concat([past, x], 2)
        self.sinks.append(opset13.assign(present, variable))
        self.variables.append(variable)
        return present


def _input(name: str, kind: Type, shape: list[int]) -> Node:
    parameter = opset13.parameter(PartialShape(shape), kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _size(x: Value, axis: int) -> Node:
    return opset13.gather(opset13.shape_of(x), np.int64(axis), np.int64(0))


def _range(start: Value | np.int64, stop: Value) -> Node:
    return opset13.range(start, stop, np.int64(1), "i64")
