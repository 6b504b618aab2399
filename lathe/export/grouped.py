"""Weights with group scales in the layout of onnxruntime's operators: `MatMulNBits`, a linear, and
`GatherBlockQuantized`, an embedding, which share the bytes of a tied head."""

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper

from lathe.export.attention import MICROSOFT
from lathe.model.groups import integer_range, weight_groups
from lathe.model.quantization import LinearFormat, WeightFormat
from lathe_serving.runtime.open_session import ROUNDED_INPUT

GROUPED = "MatMulNBits"
FLOAT_INPUT = 1


def pack(
    weight: NDArray[np.float32], form: WeightFormat
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bytes (out, groups, size * bits / 8) and scales (out, groups) of a weight (out, in): unsigned
    integers, offset by the lowest one; 4-bit ones packed two per byte, the first in the lower
    half."""
    integers, scale = weight_groups(torch.from_numpy(weight), form.group_size, form.bits)
    lowest, _ = integer_range(form.bits)
    unsigned = (integers - lowest).to(torch.uint8)
    if form.bits == 4:
        unsigned = unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)
    return unsigned.numpy(), scale[..., 0].numpy()


def linear_node(
    inputs: tuple[str, str, str], bias: str, output: str, shape: tuple[int, int], form: LinearFormat
) -> onnx.NodeProto:
    """A linear with a weight of `shape` (out, in).

    Args:
        inputs: names of x, of the bytes and of the scales.
        bias: its name, or empty.
    """
    return helper.make_node(
        GROUPED,
        [*inputs, "", "", bias] if bias else inputs,
        [output],
        name=output,
        domain=MICROSOFT,
        N=shape[0],
        K=shape[1],
        bits=form.weight.bits,
        block_size=form.weight.group_size,
        accuracy_level=ROUNDED_INPUT if form.activation else FLOAT_INPUT,
    )


def embedding_node(inputs: tuple[str, str, str], output: str, form: LinearFormat) -> onnx.NodeProto:
    """Embeddings of ids.

    Args:
        inputs: names of the bytes (V, C * bits / 8), of the ids and of the scales.
    """
    return helper.make_node(
        "GatherBlockQuantized",
        inputs,
        [output],
        name=output,
        domain=MICROSOFT,
        bits=form.weight.bits,
        block_size=form.weight.group_size,
        gather_axis=0,
        quantize_axis=1,
    )
