"""Quantized weights in files and graphs: everything that a format of `lathe.model.quantization`
needs outside of training.

- `linear`, `head`, `embedding` and `positions` add the ONNX nodes that compute with a weight, and
  `count_products` counts the kernels that onnxruntime makes of them.
- `gguf_blocks` and `compressed_tensors` lay out the same integers for other engines.
- `kernel_rounding` bounds the error of a kernel, for the proof.

Integer linears are `MatMul(DequantizeLinear(uint8 x), DequantizeLinear(int8 w))`, which onnxruntime
fuses to `MatMulIntegerToFloat`. Activations are uint8 and weights int8 because only that pair has
fast kernels on x86 (int8 x int8 falls back to a path an order of magnitude slower). No optimizer
needs to be disabled for it: SkipLayerNormFusion fuses one sum of this graph, the last, which
changes neither the speed nor, in int8, a bit of the logits.

A linear whose input has a scale per token is `MatMulInteger(uint8 x, int8 w)`, whose result is
multiplied by both scales.

A linear whose input the plan leaves in float is `MatMul(x, DequantizeLinear(int8 w))`, which
onnxruntime fuses to `MatMulNBits` of 8 bits (the head's is not fused). `open_session` makes it
compute in float32: by default it rounds x to int8.

A linear whose weight has scales in groups (INT4, dynamic INT8) is one `MatMulNBits` with its bias.
`GatherBlockQuantized` looks up embeddings in the same bytes.
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


def linear(g: Graph, name: str, x: str) -> str:
    """A linear of x, quantized according to the plan."""
    weight, spec = f"{name}.weight", g.config.architecture.find_linear(name)
    bias = g.weight(f"{name}.bias") if spec is not None and spec.name in g.config.biased else ""
    fmt = g.plan.linears.get(name) if g.plan else None
    if fmt is None:
        return _product(g, name, x, g.weight(weight), bias)
    if fmt.weight.group_size:
        n_in, n_out = g.weights[weight].shape
        stored = _grouped(g, weight, fmt, g.weights[weight].T)
        g.declare(name, None, None, n_out)
        return _grouped_product(g, (x, *stored), bias, name, (n_out, n_in), fmt)
    values, scale = _rows(g, weight, fmt, g.weights[weight].T, transpose=True)
    if fmt.activation == "dynamic_int8":
        return _product_by_token(g, name, x, values, scale, bias)
    zero_points = _zero_points(g, name, fmt, scale)
    dequantized = g.op("DequantizeLinear", values, scale, *zero_points, axis=1)
    return _product(g, name, _rounded_input(g, name, x, fmt), dequantized, bias)


def head(g: Graph, x: str) -> str:
    """The output projection: logits (B, k, V) at the requested positions."""
    weight = f"{g.tables[-1]}.weight"
    fmt = g.plan.linears.get(HEAD) if g.plan else None
    if fmt is None:
        transposed = g.op("Transpose", g.weight(weight), perm=[1, 0])
        if g.dtype == TensorProto.FLOAT:
            return g.op("MatMul", x, transposed, name="logits")
        return g.op("Cast", g.op("MatMul", x, transposed), to=TensorProto.FLOAT, name="logits")
    if fmt.weight.group_size:
        stored = _grouped(g, weight, fmt, g.weights[weight])
        return _grouped_product(g, (x, *stored), "", "logits", g.weights[weight].shape, fmt)
    table, scale = _rows(g, weight, fmt, g.weights[weight])
    # Transposed while still int8: a Transpose after DequantizeLinear would hide the integer weight
    # from onnxruntime's fusion.
    transposed = g.op("Transpose", table, perm=[1, 0])
    if fmt.activation == "dynamic_int8":
        return _product_by_token(g, HEAD, x, transposed, scale, "", "logits")
    zero_points = _zero_points(g, HEAD, fmt, scale)
    dequantized = g.op("DequantizeLinear", transposed, scale, *zero_points, axis=1)
    return g.op("MatMul", _rounded_input(g, HEAD, x, fmt), dequantized, name="logits")


def embedding(g: Graph, ids: str) -> str:
    """Token embeddings (B, T, C) of ids (B, T)."""
    name, weight = g.tables[0], f"{g.tables[0]}.weight"
    fmt = g.plan.linears.get(HEAD) if g.plan else None
    if fmt is None:
        return g.op("Gather", g.weight(weight), ids)
    if not fmt.weight.group_size:
        return _look_up_rows(g, weight, fmt, ids)
    # The bytes of a tied head too, as rows (V, C * bits / 8), which the operator expects.
    packed, *grid = _grouped(g, weight, fmt, g.weights[weight])
    rows = g.op("Reshape", packed, g.constant("rows", np.array([0, -1], np.int64)))
    node = helper.make_node(
        "GatherBlockQuantized",
        [rows, ids, *grid],
        [name],
        name=name,
        domain=MICROSOFT,
        bits=fmt.weight.bits,
        block_size=fmt.weight.group_size,
        gather_axis=0,
        quantize_axis=1,
    )
    g.nodes.append(node)
    width = g.weights[weight].shape[1]
    padded = 8 // fmt.weight.bits * math.prod(g.constants[packed].shape[1:])
    g.declare(name, None, None, padded)
    if width == padded:
        return name
    # The operator returns the padding of the last group too.
    bounds = [np.array([bound], np.int64) for bound in (0, width, -1)]
    return g.op(
        "Slice", name, *map(g.constant, ("first_feature", "n_features", "last_axis"), bounds)
    )


def positions(g: Graph, ids: str) -> str:
    """Learned position embeddings (B, T, C) of positions (B, T)."""
    table = f"{g.config.architecture.embeddings[1]}.weight"
    if offset := g.config.architecture.position_offset:
        ids = g.op("Add", ids, g.constant("position_offset", np.array(offset)))
    if g.plan and g.plan.position_embedding:
        return _look_up_rows(g, table, LinearFormat(activation=None), ids)
    return g.op("Gather", g.weight(table), ids)


def _product(g: Graph, name: str, x: str, weight: str, bias: str) -> str:
    if not bias:
        return g.op("MatMul", x, weight, name=name)
    return g.op("Add", g.op("MatMul", x, weight, name=f"{name}.matmul"), bias, name=name)


def _product_by_token(
    g: Graph, name: str, x: str, values: str, scale: str, bias: str, output: str = ""
) -> str:
    """A linear of x (..., I), which is rounded with a scale for each token, and of the integers (I,
    O) of a weight."""
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
    output = output or name
    if not bias:
        return g.op("Mul", floats, scale, name=output)
    return g.op("Add", g.op("Mul", floats, scale), bias, name=output)


def _rounded_input(g: Graph, name: str, x: str, fmt: LinearFormat) -> str:
    """x rounded to the uint8 grid of the linear's input, or unchanged if that is float."""
    if fmt.activation is None:
        return x
    grid = (
        g.constant(f"{name}.scale", np.array(fmt.activation_scale, np.float32)),
        g.constant("zero_point", np.array(ACTIVATION_ZERO_POINT, np.uint8)),
    )
    return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *grid), *grid)


def _zero_points(g: Graph, name: str, fmt: LinearFormat, scale: str) -> list[str]:
    """The zero points of a weight whose input is in float. Without them onnxruntime fails on x86
    CPUs without VNNI, where it converts such weights to uint8 (see `open_session`)."""
    if fmt.activation is not None:
        return []
    return [g.constant(f"{name}.zero_points", np.zeros(g.constants[scale].shape, np.int8))]


def _rows(
    g: Graph, weight: str, fmt: LinearFormat, matrix: NDArray[Any], transpose: bool = False
) -> tuple[str, str]:
    """Names of a weight's INT8 values (O, I), or (I, O), and of its scales (O,)."""
    scale = f"{weight}_scale"
    if weight not in g.constants:
        stored = integer_weight(torch.from_numpy(matrix), fmt)
        values = stored.values.T if transpose else stored.values
        g.constants[weight] = np.ascontiguousarray(values.numpy())
        g.constants[scale] = stored.scales[:, 0].numpy()
    return weight, scale


def _look_up_rows(g: Graph, weight: str, fmt: LinearFormat, ids: str) -> str:
    """Embeddings (B, T, C) of ids (B, T) from a table with one scale per row."""
    table, scale = _rows(g, weight, fmt, g.weights[weight])
    rows = g.op("Cast", g.op("Gather", table, ids), to=TensorProto.FLOAT)
    last = g.constant("last_axis", np.array([-1], np.int64))
    return g.op("Mul", rows, g.op("Unsqueeze", g.op("Gather", scale, ids), last))


def _grouped(g: Graph, weight: str, fmt: LinearFormat, matrix: NDArray[Any]) -> list[str]:
    """Names of the bytes (O, G, size * bits / 8) and scales (O, G) of a weight (O, I), and of its
    zero points (O, G * bits / 8) if it has them: unsigned integers, offset by the lowest one; 4-bit
    ones packed two per byte, the first in the lower half."""
    names = [weight, f"{weight}_scale"] + ([f"{weight}_zero"] if fmt.weight.zero_points else [])
    if weight not in g.constants:
        stored, lowest = integer_weight(torch.from_numpy(matrix), fmt), fmt.weight.range[0]
        # Padding is the integer 0, whose offset the kernel subtracts again.
        integers = split(stored.values, fmt.weight.group_size)
        unsigned = (integers.short() - lowest).to(torch.uint8)
        if stored.bits == 4:
            unsigned = nibbles(unsigned)
        g.constants[weight], g.constants[names[1]] = unsigned.numpy(), stored.scales.numpy()
        if stored.zero_points is not None:
            zeros = (split(stored.zero_points, 2).flatten(1) - lowest).to(torch.uint8)
            g.constants[names[2]] = nibbles(zeros).numpy()
    return names


def nibbles(values: Tensor) -> Tensor:
    """Pack integers from 0 to 15 (..., n) into bytes (..., n / 2), the first in the lower half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def _grouped_product(
    g: Graph,
    inputs: Sequence[str],
    bias: str,
    output: str,
    shape: tuple[int, ...],
    fmt: LinearFormat,
) -> str:
    """A linear with a weight of `shape` (out, in).

    Args:
        inputs: names of x, of the bytes, of the scales and of the zero points, if there are any.
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
        bits=fmt.weight.bits,
        block_size=fmt.weight.group_size,
        accuracy_level=ROUNDED_INPUT if fmt.activation else FLOAT_INPUT,
    )
    g.nodes.append(node)
    return output


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


def gguf_blocks(matrix: IntegerWeight) -> tuple[GGMLQuantizationType | None, NDArray[Any]]:
    """Q4_0, Q4_1 or Q8_0 blocks (O, bytes): a float16 scale, in Q4_1 the lowest value, then either
    16 bytes with integer j in the low and j + 16 in the high half, or 32 integers. Without a type,
    the dequantized float16 values of a weight whose inputs do not fill the blocks."""
    rows, n_in = matrix.values.shape
    if n_in % GGUF_BLOCK:
        return None, matrix.floats.half().numpy()
    grid, values = [matrix.scales], matrix.values.reshape(rows, -1, GGUF_BLOCK)
    kind = GGMLQuantizationType.Q8_0
    if matrix.bits == 4:
        kind = GGMLQuantizationType.Q4_0
        low, high = (values + 8).to(torch.uint8).view(rows, -1, 2, GGUF_BLOCK // 2).unbind(2)
        values = low | (high << 4)
    if matrix.zero_points is not None:
        kind = GGMLQuantizationType.Q4_1
        grid.append((matrix.fmt.weight.range[0] - matrix.zero_points) * matrix.scales)
    halves = [matrix.spread(x, GGUF_BLOCK).half().numpy()[..., None].view(np.uint8) for x in grid]
    blocks = np.concatenate([*halves, values.numpy().view(np.uint8)], axis=-1)
    return kind, np.ascontiguousarray(blocks.reshape(rows, -1))


def compressed_tensors(matrix: IntegerWeight) -> dict[str, Tensor]:
    """The tensors of one linear in compressed-tensors, by the last part of their names."""
    scales = matrix.scales
    if matrix.fmt.weight.quantize_type == "abs_max":
        scales = scales[:1, 0]
    if matrix.fmt.activation == "int8":
        scale = torch.tensor([matrix.fmt.activation_scale])
        return {"weight": matrix.values, "weight_scale": scales, "input_scale": scale}
    if _scales_tokens(matrix.fmt):
        return {"weight": matrix.values, "weight_scale": scales}
    tensors = {
        "weight_packed": packed_words(matrix.values, matrix.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.values.shape),
    }
    if matrix.zero_points is not None:  # packed along the outputs
        words = packed_words(matrix.zero_points.T, matrix.bits)
        tensors["weight_zero_point"] = words.T.contiguous()
    return tensors


def compressed_scheme(fmt: LinearFormat) -> dict[str, Any]:
    """The scheme of a format's linears in the `quantization_config` of compressed-tensors."""
    size, strategy = fmt.weight.group_size, STRATEGIES[fmt.weight.quantize_type]

    def arguments(bits: int, strategy: str) -> dict[str, Any]:
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": strategy,
            "dynamic": False,
        }

    weights = arguments(fmt.weight.bits, strategy) | {"symmetric": not fmt.weight.zero_points}
    inputs = None
    if fmt.activation == "int8":
        inputs = arguments(8, "tensor")
    elif _scales_tokens(fmt):
        inputs = arguments(8, "token") | {"dynamic": True}
    return {
        "format": "int-quantized" if inputs else "pack-quantized",
        "weights": weights | ({"group_size": size} if size else {}),
        "input_activations": inputs,
    }


def _scales_tokens(fmt: LinearFormat) -> bool:
    """Whether inputs are rounded with one scale for each token."""
    return fmt.activation == "dynamic_int8" and not fmt.weight.group_size


def packed_words(values: Tensor, bits: int) -> Tensor:
    """Pack integers (O, I) of 4 or 8 bits into int32, 32 / bits per word, the first in the lowest
    bits."""
    per_word = WORD // bits
    unsigned = F.pad(values.long() + 2 ** (bits - 1), (0, -values.shape[1] % per_word))
    words = unsigned.view(len(values), -1, per_word) << torch.arange(0, WORD, bits)
    joined: Tensor = words.sum(-1).to(torch.int32)
    return joined
