"""GPT-2 in OpenVINO's operators, with the keys and values as states of the graph."""

import numpy as np
from openvino import Model, Node, Output, PartialShape, Type, opset13
from openvino.op.util import Variable, VariableInfo

from peers.engine import Weights

EPSILON = 1e-5
Value = Node | Output


def build(w: Weights, chosen: bool) -> Model:
    """Inputs as OpenVINO GenAI names them: `input_ids`, `attention_mask` and `position_ids`
    (B, T), `beam_idx` (B,); output `logits` (B, T, V). Where they are to be `chosen`, a further
    input `first` (1,) is the first position that has logits."""
    return _Graph(w).model(chosen)


class _Graph:
    def __init__(self, w: Weights) -> None:
        self.w = w
        self.sinks: list[Node] = []
        self.variables: list[Variable] = []
        self.ids = _input("input_ids", Type.i64, [-1, -1])
        self.known = _input("attention_mask", Type.i64, [-1, -1])
        self.positions = _input("position_ids", Type.i64, [-1, -1])
        self.beams = _input("beam_idx", Type.i32, [-1])

    def model(self, chosen: bool) -> Model:
        w, zero = self.w, np.int64(0)
        table = opset13.constant(w["wte.weight"], name="wte.weight")
        ids = opset13.convert(self.ids, "i32")
        places = opset13.convert(self.positions, "i32")
        x = opset13.add(
            opset13.gather(table, ids, zero),
            opset13.gather(opset13.constant(w["wpe.weight"], name="wpe.weight"), places, zero),
        )
        mask = self.mask()
        for i in range(w.n_layer):
            x = opset13.add(x, self.attention(i, self.norm(f"h.{i}.ln_1", x), mask))
            inner = self.linear(f"h.{i}.mlp.c_fc", self.norm(f"h.{i}.ln_2", x))
            inner = opset13.gelu(inner, "tanh")
            x = opset13.add(x, self.linear(f"h.{i}.mlp.c_proj", inner))
        inputs = [self.ids, self.known, self.positions, self.beams]
        if chosen:
            inputs.append(first := _input("first", Type.i64, [1]))
            x = opset13.slice(x, first, np.array([2**31]), np.array([1]), np.array([1]))
        logits = opset13.matmul(self.norm("ln_f", x), table, False, True, name="lm_head")
        result = opset13.result(logits)
        result.output(0).get_tensor().set_names({"logits"})
        return Model([result], self.sinks, inputs, self.variables, "gpt2")

    def norm(self, name: str, x: Value) -> Node:
        normal = opset13.mvn(x, np.array([-1]), True, EPSILON, "inside_sqrt")
        scaled = opset13.multiply(normal, self.w[f"{name}.weight"])
        return opset13.add(scaled, self.w[f"{name}.bias"])

    def linear(self, name: str, x: Value) -> Node:
        weight = opset13.constant(self.w.linear(name), name=f"{name}.weight")
        product = opset13.matmul(x, weight, False, True, name=name)
        return opset13.add(product, self.w[f"{name}.bias"])

    def mask(self) -> Node:
        """(B, 1, T, S), true where a token may see another one."""
        length = _size(self.ids, 1)
        total = _size(self.known, 1)
        columns = _range(np.int64(0), total)
        rows = opset13.unsqueeze(_range(opset13.subtract(total, length), total), np.int64(1))
        causal = opset13.less_equal(columns, rows)
        known = opset13.not_equal(self.known, np.int64(0))
        known = opset13.unsqueeze(known, np.array([1, 2]))
        return opset13.logical_and(causal, known)

    def attention(self, i: int, x: Value, mask: Value) -> Node:
        heads, size = self.w.n_head, self.w.head_dim
        qkv = opset13.split(self.linear(f"h.{i}.attn.c_attn", x), np.int64(2), 3).outputs()
        query, key, value = (self.by_head(part) for part in qkv)
        keys, values = self.cached(f"{i}.key", key), self.cached(f"{i}.value", value)
        mixed = opset13.scaled_dot_product_attention(query, keys, values, mask)
        rows = opset13.transpose(mixed, np.array([0, 2, 1, 3]))
        joined = opset13.reshape(rows, np.array([0, 0, heads * size]), True)
        return self.linear(f"h.{i}.attn.c_proj", joined)

    def by_head(self, x: Value) -> Node:
        """(B, T, C) -> (B, heads, T, size)."""
        split = opset13.reshape(x, np.array([0, 0, self.w.n_head, self.w.head_dim]), True)
        return opset13.transpose(split, np.array([0, 2, 1, 3]))

    def cached(self, name: str, x: Value) -> Node:
        """What the state and x have together, which is the new state."""
        shape = PartialShape([-1, self.w.n_head, -1, self.w.head_dim])
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, Type.f32, name
        variable = Variable(info)
        rows = opset13.unsqueeze(_size(self.ids, 0), np.int64(0))
        rest = np.array([self.w.n_head, 0, self.w.head_dim])
        empty = opset13.broadcast(np.float32(0), opset13.concat([rows, rest], 0))
        past = opset13.read_value(empty, variable)
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
