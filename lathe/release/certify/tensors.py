"""Compares the tensors of two checkpoints, or of two ONNX graphs, byte by byte."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors import deserialize

from lathe.model.folder import WEIGHTS
from lathe_base.provenance.chain import GRAPH
from lathe_base.storage import sha256

WIDTHS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class WeightDigests:
    """SHA-256 of a checkpoint's weights: the file, and the bytes of every tensor by name."""

    file: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor, in alphabetical order, that differs between two files.

    Attributes:
        largest: largest absolute difference of two elements; None if shapes or types differ, or one
            lacks the tensor.
        elements: number that differ.
    """

    tensor: str
    largest: float | None
    elements: int | None


def weight_digests(checkpoint: Path) -> WeightDigests:
    """The digests of a checkpoint folder's weights."""
    tensors = {name: hashlib.sha256(part["data"]).hexdigest() for name, part in _read(checkpoint)}
    return WeightDigests(sha256(checkpoint / WEIGHTS), tensors)


def first_difference(one: Path, other: Path, name: str = WEIGHTS) -> TensorDifference | None:
    """The first tensor that differs; None if all are bitwise equal.

    Args:
        one, other: folders.
        name: the file in them: that of a checkpoint's weights, or `GRAPH`.
    """
    read = _read_graph if name == GRAPH else _read
    first, second = dict(read(one)), dict(read(other))
    for tensor in sorted({*first, *second}):
        a, b = first.get(tensor), second.get(tensor)
        if a is None or b is None or (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
            return TensorDifference(tensor, None, None)
        if a["data"] != b["data"]:
            # In float64, which holds every value of a narrower float exactly.
            x, y = _values(a), _values(b)
            return TensorDifference(tensor, float(np.max(np.abs(x - y))), int(np.sum(x != y)))
    return None


def _read(checkpoint: Path) -> Iterator[tuple[str, dict]]:  # type: ignore[type-arg]
    tensors = deserialize((checkpoint / WEIGHTS).read_bytes())
    yield from sorted(tensors)


def _read_graph(folder: Path) -> Iterator[tuple[str, dict]]:  # type: ignore[type-arg]
    for initializer in onnx.load(folder / GRAPH).graph.initializer:
        array = numpy_helper.to_array(initializer)
        part = {"dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes()}
        yield initializer.name, part | {"array": array}


def _values(part: dict) -> np.ndarray:  # type: ignore[type-arg]
    if "array" in part:
        return np.asarray(part["array"]).astype(np.float64)
    values = np.frombuffer(part["data"], WIDTHS[part["dtype"]])
    if part["dtype"] == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)
