"""Runs an export with onnxruntime, with a second copy of its INT8 weights that is laid out for one
token at a time.

`MatMul(DequantizeLinear(uint8 x), DequantizeLinear(int8 w))` is an integer product that is
efficient for many rows. With one row, reading the weights takes most of the time, and onnxruntime's
8-bit `MatMulNBits` reads them 1.4 times as fast. Weights and scales are those of the export; the
input is rounded to 8 bits in groups, not with the calibrated scale.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import MODEL, WEIGHTS, Ids, Logits
from lathe_serving.runtime.kv_cache import KVCache
from lathe_serving.runtime.session import (
    ROUNDED_INPUT,
    ContiguousCache,
    OnnxModel,
    open_session,
)

SIZE = 128  # of a group of features with a scale of the input
SIGN = 0x80  # turns an int8 into a uint8 that is 128 more


class SingleStreamModel(OnnxModel):
    """An export run by onnxruntime: steps of one token with `single_stream`, a graph that reads its
    weights faster, and all others with the exported graph.

    Raises:
        UserError: also if the export has no INT8 linears.
    """

    runtime = "onnxruntime_single_stream"

    def __init__(self, folder: Path, threads: int = 0, session: Any = None) -> None:
        super().__init__(folder, threads, session)
        # From a file, since onnxruntime keeps a serialized graph that it is given in memory.
        with TemporaryDirectory() as work:
            graph = Path(work) / MODEL
            if not write_single_stream_graph(self.folder / MODEL, graph):
                raise UserError(
                    f"{folder}: has no linears in static INT8, which this runtime requires",
                    "set Serving.runtime=onnxruntime",
                    Code.UNSUPPORTED,
                )
            self.single_stream = OnnxModel(folder, threads, open_session(graph, threads))

    def _bound(self, buffers: list[NDArray[Any]], lengths: Ids, capacity: int) -> ContiguousCache:
        cache = super()._bound(buffers, lengths, capacity)
        if len(lengths) == 1:
            cache.single_stream = self.single_stream._bound(buffers, lengths, capacity)
        return cache

    def _append(self, cache: KVCache, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        assert isinstance(cache, ContiguousCache)
        if cache.single_stream is None or tokens.size > 1:
            return super()._append(cache, tokens, lengths, index)
        return self.single_stream._append(cache.single_stream, tokens, lengths, index)


def write_single_stream_graph(exported: Path, path: Path) -> bool:
    """Change the layout of an exported file; returns False, and writes nothing, if it has no INT8
    linears."""
    graph = _Graph(onnx.load(exported))
    products = [node for node in graph.nodes if graph.is_integer_product(node)]
    for node in products:
        graph.replace(node)
    graph.drop_unused()
    if products:
        is_large = (exported.parent / WEIGHTS).is_file()
        onnx.save(graph.model, path, save_as_external_data=is_large, location=WEIGHTS)
    return bool(products)


def reads_single_stream(exported: Path) -> bool:
    """Whether the linears of an exported file already are integer `MatMulNBits`, like those of
    dynamic INT8 and INT4."""
    graph = _Graph(onnx.load(exported, load_external_data=False))
    rounds_in_groups = any(
        node.op_type == "MatMulNBits"
        and any(a.name == "accuracy_level" and a.i == ROUNDED_INPUT for a in node.attribute)
        for node in graph.nodes
    )
    return rounds_in_groups and not any(map(graph.is_integer_product, graph.nodes))


class _Graph:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.nodes = model, model.graph.node
        self.initializers = model.graph.initializer
        self.made = {name: node for node in self.nodes for name in node.output}
        self.constants = {tensor.name: tensor for tensor in self.initializers}

    def is_integer_product(self, node: onnx.NodeProto) -> bool:
        if node.op_type != "MatMul":
            return False
        factors = [self.made.get(name) for name in node.input]
        return all(factor and factor.op_type == "DequantizeLinear" for factor in factors)

    def replace(self, node: onnx.NodeProto) -> None:
        """Turn an integer product into MatMulNBits, with the input before rounding."""
        rounded, weight = (self.made[name] for name in node.input)
        # The weight as (out, in); that of a tied head already is, before its Transpose.
        rows: NDArray[np.int8]
        if weight.input[0] in self.constants:
            stored = self.constants[weight.input[0]]
            rows = np.ascontiguousarray(numpy_helper.to_array(stored).T)
        else:
            transpose = self.made[weight.input[0]]
            rows = numpy_helper.to_array(self.constants[transpose.input[0]])
        n_out, n_in = rows.shape
        groups = -(-n_in // SIZE)
        packed = np.full((n_out, groups * SIZE), SIGN, np.uint8)  # zeros after the last feature
        np.bitwise_xor(rows.view(np.uint8), np.uint8(SIGN), out=packed[:, :n_in])
        # The export has a scale for each output: all groups of one have the same.
        scales = np.repeat(numpy_helper.to_array(self.constants[weight.input[1]]), groups)
        names = f"{node.name}.rows", f"{node.name}.scales"
        for name, value in zip(names, (packed.reshape(n_out, groups, SIZE), scales), strict=True):
            self.initializers.append(numpy_helper.from_array(value, name))
        made = helper.make_node(
            "MatMulNBits",
            [self.made[rounded.input[0]].input[0], *names],
            list(node.output),
            name=node.name,
            domain="com.microsoft",
            N=n_out,
            K=n_in,
            bits=8,
            block_size=SIZE,
            accuracy_level=ROUNDED_INPUT,
        )
        node.CopyFrom(made)

    def drop_unused(self) -> None:
        """Remove unused nodes and initializers."""
        needed = {value.name for value in self.model.graph.output}
        for i in reversed(range(len(self.nodes))):
            if needed.isdisjoint(self.nodes[i].output):
                del self.nodes[i]
            else:
                needed.update(_reads(self.nodes[i]))
        for i in reversed(range(len(self.initializers))):
            if self.initializers[i].name not in needed:
                del self.initializers[i]


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node or its branches read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)
