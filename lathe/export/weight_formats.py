"""Quantized weights in files and graphs: everything that a format of `lathe.model.quantization`
needs outside of training.

A class for each way to round (`lathe.model.integer_weights`) stores weights and computes with them:

- Its `linear`, `head` and `embedding` add the ONNX nodes; `FloatWeights` are not quantized.
- Its `to_gguf` and `to_compressed_tensors` lay out the same integers for other engines.

`storage` chooses the class of a format, and `stored_weights` that of a linear in a graph.

`count_products` counts the kernels that onnxruntime makes of the nodes, and `kernel_rounding`
bounds the error of one, for the proof.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from lathe.export.graph import MICROSOFT, Graph
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import HFTensors
from lathe.model.compressed_tensors import WORD
from lathe.model.gpt import GPT
from lathe.model.integer_weights import (
    SCALE_OF_ZEROS,
    IntegerWeight,
    integer_weight,
    split,
    weight_rounding,
)
from lathe.model.quantization import ACTIVATION_LEVELS, LinearFormat
from lathe_serving.runtime.session import ROUNDED_INPUT

ACTIVATION_ZERO_POINT = 128
GROUPED = "MatMulNBits"
FLOAT_INPUT = 1
"""`accuracy_level` of `MatMulNBits` with inputs in float32."""
INTEGER_KERNELS = (
    "MatMulIntegerToFloat",
    "MatMulInteger",
    "QLinearMatMul",
    "QGemm",
    f"{GROUPED} of integers",
)
FLOAT_KERNELS = ("MatMul", "FusedMatMul", "Gemm", GROUPED)
SMALLEST_PEAK = 1e-30
"""Magnitude of a token of zeros, whose scale must not be 0."""
OFFSET_ROUNDING = 3e-7
"""Rounding error of what MatMulNBits adds and subtracts again, since it stores integers without a
sign, relative to the inputs of a group times the weight's entry of largest magnitude. Observed:
6e-8."""
GGUF_BLOCK = 32
"""Number of inputs that share a scale in Q4_0 and Q8_0."""
STRATEGIES = {"abs_max": "tensor", "channel_wise_abs_max": "channel", "group_wise": "group"}
"""Names of compressed-tensors."""


@torch.no_grad()
def stored_matrices(model: GPT) -> Iterator[tuple[str, Tensor | IntegerWeight]]:
    """Yield every tensor with its Hugging Face name, without the prefix, in Hugging Face's layout
    except that linears are always (out, in); quantized ones as integers."""
    config = model.config
    family, plan = config.architecture, config.quantization
    linears = dict(plan.linears) if plan else {}
    if HEAD in linears:
        linears |= dict.fromkeys(config.tables, linears[HEAD])
    formats = {f"{name}.weight": fmt for name, fmt in linears.items()}
    if plan and plan.position_embedding:
        formats[f"{family.embeddings[1]}.weight"] = LinearFormat(activation=None)
    stored = HFTensors(model)
    for name, tensor in stored.items():
        whole = stored.parameter_name(name)
        matrix = tensor.T if family.is_conv1d(name) else tensor
        if (fmt := formats.get(whole)) is None:
            yield name, matrix.contiguous()
            continue
        scale = None
        if fmt.weight.quantize_type == "abs_max":  # one scale for all that is fused
            scale = weight_rounding(fmt.weight).grid(model.get_parameter(whole)).scale
        yield name, integer_weight(matrix, fmt, scale)


class FloatWeights:
    """Weights that are not quantized."""

    def linear(self, g: Graph, name: str, x: str) -> str:
        """A linear of x."""
        return _product(g, name, x, g.weight(f"{name}.weight"), name)

    def head(self, g: Graph, x: str) -> str:
        """The output projection: logits (B, k, V) at the requested positions."""
        transposed = g.op("Transpose", g.weight(f"{g.tables[-1]}.weight"), perm=[1, 0])
        if g.dtype == TensorProto.FLOAT:
            return g.op("MatMul", x, transposed, name="logits")
        return g.op("Cast", g.op("MatMul", x, transposed), to=TensorProto.FLOAT, name="logits")

    def embedding(self, g: Graph, ids: str) -> str:
        """Token embeddings (B, T, C) of ids (B, T)."""
        return g.op("Gather", g.weight(f"{g.tables[0]}.weight"), ids)


class RowWeights(FloatWeights):
    """Weights with one scale for a row, or for the whole weight.

    A linear is `MatMul(DequantizeLinear(uint8 x), DequantizeLinear(int8 w))`, which onnxruntime
    fuses to `MatMulIntegerToFloat`. Activations are uint8 and weights int8 because only that pair
    has fast kernels on x86 (int8 x int8 falls back to a path an order of magnitude slower). No
    optimizer needs to be disabled for it: SkipLayerNormFusion fuses one sum of this graph, the
    last, which changes neither the speed nor, in int8, a bit of the logits.

    A linear whose input the plan leaves in float is `MatMul(x, DequantizeLinear(int8 w))`, which
    onnxruntime fuses to `MatMulNBits` of 8 bits (the head's is not fused). `open_session` makes it
    compute in float32: by default it rounds x to int8.
    """

    def __init__(self, fmt: LinearFormat) -> None:
        self.fmt = fmt

    def linear(self, g: Graph, name: str, x: str) -> str:
        weight = f"{name}.weight"
        values, scale = self._store(g, weight, g.weights[weight].T, transpose=True)
        return self._multiply(g, name, x, values, scale, name)

    def head(self, g: Graph, x: str) -> str:
        weight = f"{g.tables[-1]}.weight"
        table, scale = self._store(g, weight, g.weights[weight])
        # Transposed while still int8: a Transpose after DequantizeLinear would hide the integer
        # weight from onnxruntime's fusion.
        transposed = g.op("Transpose", table, perm=[1, 0])
        return self._multiply(g, HEAD, x, transposed, scale, "logits")

    def embedding(self, g: Graph, ids: str) -> str:
        return self.look_up(g, f"{g.tables[0]}.weight", ids)

    def look_up(self, g: Graph, weight: str, ids: str) -> str:
        """Embeddings (B, T, C) of ids (B, T) from a table."""
        table, scale = self._store(g, weight, g.weights[weight])
        rows = g.op("Cast", g.op("Gather", table, ids), to=TensorProto.FLOAT)
        last = g.constant("last_axis", np.array([-1], np.int64))
        return g.op("Mul", rows, g.op("Unsqueeze", g.op("Gather", scale, ids), last))

    def _store(
        self, g: Graph, weight: str, matrix: NDArray[Any], transpose: bool = False
    ) -> tuple[str, str]:
        """Names of a weight's INT8 values (O, I), or (I, O), and of its scales (O,)."""
        scale = f"{weight}_scale"
        if weight not in g.constants:
            stored = integer_weight(torch.from_numpy(matrix), self.fmt)
            values = stored.values.T if transpose else stored.values
            g.constants[weight] = np.ascontiguousarray(values.numpy())
            g.constants[scale] = stored.scales[:, 0].numpy()
        return weight, scale

    def _multiply(self, g: Graph, name: str, x: str, values: str, scale: str, output: str) -> str:
        """A linear of x (..., I) and of the integers (I, O) of a weight."""
        zero_points = self._zero_points(g, name, scale)
        dequantized = g.op("DequantizeLinear", values, scale, *zero_points, axis=1)
        return _product(g, name, self._rounded_input(g, name, x), dequantized, output)

    def _rounded_input(self, g: Graph, name: str, x: str) -> str:
        """x rounded to the uint8 grid of the linear's input, or unchanged if that is float."""
        if self.fmt.activation is None:
            return x
        grid = (
            g.constant(f"{name}.scale", np.array(self.fmt.activation_scale, np.float32)),
            g.constant("zero_point", np.array(ACTIVATION_ZERO_POINT, np.uint8)),
        )
        return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *grid), *grid)

    def _zero_points(self, g: Graph, name: str, scale: str) -> list[str]:
        """The zero points of a weight whose input is in float. Without them onnxruntime fails on
        x86 CPUs without VNNI, where it converts such weights to uint8 (see `open_session`)."""
        if self.fmt.activation is not None:
            return []
        return [g.constant(f"{name}.zero_points", np.zeros(g.constants[scale].shape, np.int8))]

    def to_gguf(self, matrix: IntegerWeight) -> tuple[GGMLQuantizationType | None, NDArray[Any]]:
        """The type and the blocks (O, bytes) of a weight. A block has the header of
        `_gguf_header` in float16, and then 32 integers, or 16 bytes with integer j in the low and j
        + 16 in the high half. Without a type, the dequantized float16 values of a weight whose
        inputs do not fill the blocks."""
        rows, n_in = matrix.values.shape
        if n_in % GGUF_BLOCK:
            return None, matrix.floats.half().numpy()
        kind, header = self._gguf_header(matrix)
        values = matrix.values.reshape(rows, -1, GGUF_BLOCK)
        if matrix.bits == 4:
            low, high = (values + 8).to(torch.uint8).view(rows, -1, 2, GGUF_BLOCK // 2).unbind(2)
            values = low | (high << 4)
        halves = [
            matrix.spread(x, GGUF_BLOCK).half().numpy()[..., None].view(np.uint8) for x in header
        ]
        blocks = np.concatenate([*halves, values.numpy().view(np.uint8)], axis=-1)
        return kind, np.ascontiguousarray(blocks.reshape(rows, -1))

    def _gguf_header(self, matrix: IntegerWeight) -> tuple[GGMLQuantizationType, list[Tensor]]:
        """The type of a weight's blocks, and what a block has before the integers, (O, G) each."""
        types = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}
        return types[matrix.bits], [matrix.scales]

    def to_compressed_tensors(self, matrix: IntegerWeight) -> dict[str, Tensor]:
        """The tensors of one linear in compressed-tensors, by the last part of their names."""
        is_whole = self.fmt.weight.quantize_type == "abs_max"
        scales = matrix.scales[:1, 0] if is_whole else matrix.scales
        if self._compressed_inputs() is None:
            return {
                "weight_packed": packed_words(matrix.values, matrix.bits),
                "weight_scale": scales,
                "weight_shape": torch.tensor(matrix.values.shape),
            }
        tensors = {"weight": matrix.values, "weight_scale": scales}
        if self.fmt.activation == "int8":
            tensors["input_scale"] = torch.tensor([matrix.fmt.activation_scale])
        return tensors

    def compressed_scheme(self) -> dict[str, Any]:
        """The scheme of the format's linears in the `quantization_config` of compressed-tensors."""
        weight, inputs = self.fmt.weight, self._compressed_inputs()
        weights = _compressed_arguments(weight.bits, STRATEGIES[weight.quantize_type])
        weights["symmetric"] = not weight.zero_points
        return {
            "format": "int-quantized" if inputs else "pack-quantized",
            "weights": weights | ({"group_size": weight.group_size} if weight.group_size else {}),
            "input_activations": inputs,
        }

    def _compressed_inputs(self) -> dict[str, Any] | None:
        """The scheme of inputs that engines round; None leaves them in float."""
        return _compressed_arguments(8, "tensor") if self.fmt.activation == "int8" else None


class TokenScaleWeights(RowWeights):
    """Weights with one scale for a row, or for the whole weight, and inputs with one for each
    token: a linear is `MatMulInteger(uint8 x, int8 w)`, whose result is multiplied by both."""

    def _multiply(self, g: Graph, name: str, x: str, values: str, scale: str, output: str) -> str:
        last = g.constant("last_axis", np.array([-1], np.int64))
        peak = g.op("ReduceMax", g.op("Abs", x, name=f"{name}.magnitudes"), last, keepdims=1)
        peak = g.op("Max", peak, g.constant("smallest_peak", np.array(SMALLEST_PEAK, np.float32)))
        levels = g.constant("levels", np.array(ACTIVATION_LEVELS, np.float32))
        x_scale = g.op("Div", peak, levels)
        offset = g.constant("zero_point_float", np.array(ACTIVATION_ZERO_POINT, np.float32))
        shifted = g.op("Add", g.op("Round", g.op("Div", x, x_scale)), offset)
        integers = g.op("Cast", shifted, to=TensorProto.UINT8)
        zero_point = g.constant("zero_point", np.array(ACTIVATION_ZERO_POINT, np.uint8))
        product = g.op("MatMulInteger", integers, values, zero_point, name=f"{name}.matmul")
        floats = g.op("Mul", g.op("Cast", product, to=TensorProto.FLOAT), x_scale)
        if not (bias := _bias(g, name)):
            return g.op("Mul", floats, scale, name=output)
        return g.op("Add", g.op("Mul", floats, scale), bias, name=output)

    def _compressed_inputs(self) -> dict[str, Any]:
        return _compressed_arguments(8, "token") | {"dynamic": True}


class GroupWeights(RowWeights):
    """Weights with scales in groups (INT4, dynamic INT8): a linear is one `MatMulNBits` with its
    bias. `GatherBlockQuantized` looks up embeddings in the same bytes."""

    def linear(self, g: Graph, name: str, x: str) -> str:
        weight = f"{name}.weight"
        n_in, n_out = g.weights[weight].shape
        stored = self._store_groups(g, weight, g.weights[weight].T)
        g.declare(name, None, None, n_out)
        return self._multiply_groups(g, (x, *stored), _bias(g, name), name, (n_out, n_in))

    def head(self, g: Graph, x: str) -> str:
        weight = f"{g.tables[-1]}.weight"
        stored = self._store_groups(g, weight, g.weights[weight])
        return self._multiply_groups(g, (x, *stored), "", "logits", g.weights[weight].shape)

    def embedding(self, g: Graph, ids: str) -> str:
        name, weight = g.tables[0], f"{g.tables[0]}.weight"
        # The bytes of a tied head too, as rows (V, C * bits / 8), which the operator expects.
        packed, *grid = self._store_groups(g, weight, g.weights[weight])
        rows = g.op("Reshape", packed, g.constant("rows", np.array([0, -1], np.int64)))
        node = helper.make_node(
            "GatherBlockQuantized",
            [rows, ids, *grid],
            [name],
            name=name,
            domain=MICROSOFT,
            bits=self.fmt.weight.bits,
            block_size=self.fmt.weight.group_size,
            gather_axis=0,
            quantize_axis=1,
        )
        g.nodes.append(node)
        width = g.weights[weight].shape[1]
        padded = 8 // self.fmt.weight.bits * math.prod(g.constants[packed].shape[1:])
        g.declare(name, None, None, padded)
        if width == padded:
            return name
        # The operator returns the padding of the last group too.
        bounds = [np.array([bound], np.int64) for bound in (0, width, -1)]
        return g.op(
            "Slice", name, *map(g.constant, ("first_feature", "n_features", "last_axis"), bounds)
        )

    def _store_groups(self, g: Graph, weight: str, matrix: NDArray[Any]) -> list[str]:
        """Names of the bytes (O, G, size * bits / 8) and scales (O, G) of a weight (O, I), and of
        its zero points (O, G * bits / 8) if it has them: unsigned integers, offset by the lowest
        one; 4-bit ones packed two per byte, the first in the lower half."""
        names = [weight, f"{weight}_scale"]
        if self.fmt.weight.zero_points:
            names.append(f"{weight}_zero")
        if weight not in g.constants:
            stored = integer_weight(torch.from_numpy(matrix), self.fmt)
            lowest = self.fmt.weight.range[0]
            # Padding is the integer 0, whose offset the kernel subtracts again.
            integers = split(stored.values, self.fmt.weight.group_size)
            unsigned = (integers.short() - lowest).to(torch.uint8)
            if stored.bits == 4:
                unsigned = nibbles(unsigned)
            g.constants[weight], g.constants[names[1]] = unsigned.numpy(), stored.scales.numpy()
            if stored.zero_points is not None:
                zeros = (split(stored.zero_points, 2).flatten(1) - lowest).to(torch.uint8)
                g.constants[names[2]] = nibbles(zeros).numpy()
        return names

    def _multiply_groups(
        self, g: Graph, inputs: Sequence[str], bias: str, output: str, shape: tuple[int, ...]
    ) -> str:
        """A linear with a weight of `shape` (out, in).

        Args:
            inputs: names of x, of the bytes, of the scales and of the zero points, if there are
                any.
            bias: its name, or empty.
        """
        node = helper.make_node(
            GROUPED,
            [*inputs, *[""] * (5 - len(inputs)), bias] if bias else inputs,
            [output],
            name=output,
            domain=MICROSOFT,
            N=shape[0],
            K=shape[1],
            bits=self.fmt.weight.bits,
            block_size=self.fmt.weight.group_size,
            accuracy_level=ROUNDED_INPUT if self.fmt.activation else FLOAT_INPUT,
        )
        g.nodes.append(node)
        return output


class ZeroPointWeights(GroupWeights):
    """Groups of 4 bits with zero points."""

    def _gguf_header(self, matrix: IntegerWeight) -> tuple[GGMLQuantizationType, list[Tensor]]:
        assert matrix.zero_points is not None
        lowest = (self.fmt.weight.range[0] - matrix.zero_points) * matrix.scales
        return GGMLQuantizationType.Q4_1, [matrix.scales, lowest]

    def to_compressed_tensors(self, matrix: IntegerWeight) -> dict[str, Tensor]:
        assert matrix.zero_points is not None
        words = packed_words(matrix.zero_points.T, matrix.bits)  # along the outputs
        zeros = {"weight_zero_point": words.T.contiguous()}
        return super().to_compressed_tensors(matrix) | zeros


def storage(fmt: LinearFormat) -> RowWeights:
    """How the weights of a format are stored."""
    if fmt.weight.group_size:
        return ZeroPointWeights(fmt) if fmt.weight.zero_points else GroupWeights(fmt)
    return TokenScaleWeights(fmt) if fmt.activation == "dynamic_int8" else RowWeights(fmt)


def stored_weights(g: Graph, name: str) -> FloatWeights:
    """How the weight of a linear is stored in a graph; that of the head is the embedding's too."""
    fmt = g.plan.linears.get(name) if g.plan else None
    return FloatWeights() if fmt is None else storage(fmt)


def linear(g: Graph, name: str, x: str) -> str:
    """A linear of x, quantized according to the plan."""
    return stored_weights(g, name).linear(g, name, x)


def positions(g: Graph, ids: str) -> str:
    """Learned position embeddings (B, T, C) of positions (B, T)."""
    table = f"{g.config.architecture.embeddings[1]}.weight"
    if offset := g.config.architecture.position_offset:
        ids = g.op("Add", ids, g.constant("position_offset", np.array(offset)))
    if g.plan and g.plan.position_embedding:
        return RowWeights(LinearFormat(activation=None)).look_up(g, table, ids)
    return g.op("Gather", g.weight(table), ids)


def _bias(g: Graph, name: str) -> str:
    """Name of a linear's bias; empty if it has none."""
    spec = g.config.architecture.find_linear(name)
    has_bias = spec is not None and spec.name in g.config.biased
    return g.weight(f"{name}.bias") if has_bias else ""


def _product(g: Graph, name: str, x: str, weight: str, output: str) -> str:
    """x times the weight (in, out) of a linear, and its bias."""
    if not (bias := _bias(g, name)):
        return g.op("MatMul", x, weight, name=output)
    return g.op("Add", g.op("MatMul", x, weight, name=f"{name}.matmul"), bias, name=output)


def _compressed_arguments(bits: int, strategy: str) -> dict[str, Any]:
    """How compressed-tensors describes symmetric integers."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }


def nibbles(values: Tensor) -> Tensor:
    """Pack integers from 0 to 15 (..., n) into bytes (..., n / 2), the first in the lower half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def count_products(nodes: Iterable[onnx.NodeProto]) -> tuple[int, int]:
    """Number of matrix products of integers and of floats in an optimized graph."""
    ops = Counter[str]()
    for node in nodes:
        levels = {a.name: a.i for a in node.attribute if a.name == "accuracy_level"}
        # The one operator of both kinds: an attribute decides whether it rounds its input.
        rounds = node.op_type == GROUPED and levels.get("accuracy_level") == ROUNDED_INPUT
        ops[f"{GROUPED} of integers" if rounds else node.op_type] += 1
    return sum(ops[op] for op in INTEGER_KERNELS), sum(ops[op] for op in FLOAT_KERNELS)


def kernel_rounding(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """(..., O): rounding error of MatMulNBits's offsets, for inputs x (..., I) and a weight (O, I)
    in groups of `size`."""
    largest = split(weight.abs(), size).amax(-1)  # (O, G)
    largest = largest.clamp(min=128 * SCALE_OF_ZEROS)  # a group of zeros has a scale too
    return OFFSET_ROUNDING * split(x.abs(), size).sum(-1) @ largest.T


def packed_words(values: Tensor, bits: int) -> Tensor:
    """Pack integers (O, I) of 4 or 8 bits into int32, 32 / bits per word, the first in the lowest
    bits."""
    per_word = WORD // bits
    unsigned = F.pad(values.long() + 2 ** (bits - 1), (0, -values.shape[1] % per_word))
    words = unsigned.view(len(values), -1, per_word) << torch.arange(0, WORD, bits)
    joined: Tensor = words.sum(-1).to(torch.int32)
    return joined
