"""Reads and writes `.pdparams` files, which are pickles, without Paddle. Reading admits only arrays
and plain containers.

Paddle saves a dictionary of numpy arrays by parameter name, and with them the table
`StructuredToParameterName@@`. With protocols 2 and 3, an array above 1 GB is cut into slices,
which `UnpackBigParamInfor@@` lists. bfloat16 is stored as its bits, in uint16.
"""

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_base.inputs import open_file
from lathe_base.storage import atomic_file

NAMES = "StructuredToParameterName@@"
SLICES = "UnpackBigParamInfor@@"
PROTOCOL = 4  # with which an array of any size stays whole
NDARRAY = "ndarray"  # stands for the type, which a pickle could call with any shape

HINT = "save only the model's state dictionary: `paddle.save(model.state_dict(), path)`"


def read_pdparams(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name; bfloat16 becomes float32, other types stay.

    Raises:
        UserError: no such file, not a .pdparams file, or one with anything but arrays in it.
    """
    with open_file(path, "give a .pdparams file") as file:
        return load_pdparams(file, str(path))


def load_pdparams(file: IO[bytes], path: str) -> dict[str, NDArray[Any]]:
    """`read_pdparams` of an open file, which may be part of an archive; `path` is for messages."""
    try:
        arrays = _ArraysOnly(file, path).load()
    except (OSError, UserError):
        raise
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        what = f"{path}: not a .pdparams file: {error}"
        raise UserError(what, "copy the file again", Code.MALFORMED) from None
    if not isinstance(arrays, dict):
        raise UserError(
            f"{path}: contains a {type(arrays).__name__}, not tensors by name",
            HINT,
            Code.WRONG_KIND,
        )
    arrays.pop(NAMES, None)
    # Join the slices of large arrays. Whatever does not fit is one error: both the table and the
    # slices are the file's.
    try:
        for name, part in arrays.pop(SLICES, {}).items():
            pieces = [arrays.pop(piece) for piece in part["slices"]]
            if name in arrays or not all(isinstance(piece, np.ndarray) for piece in pieces):
                raise ValueError(f"of {name}")
            arrays[name] = np.concatenate([p.ravel() for p in pieces]).reshape(part["OriginShape"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path}: its slices do not fit ({reason})", "copy the file again", Code.CORRUPT
        ) from None
    for name in arrays:
        if not isinstance(name, str):
            raise UserError(
                f"{path}: a tensor's name is a {type(name).__name__}, not text",
                HINT,
                Code.MALFORMED,
            )
    return {name: _array(name, value, path) for name, value in arrays.items()}


def write_pdparams(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write what `paddle.load` reads as a state dictionary."""
    state = {**arrays, NAMES: {name: name for name in arrays}}
    with atomic_file(path) as work, work.open("wb") as file:
        pickle.dump(state, file, PROTOCOL)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler that admits only the names that arrays and plain containers need."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            # Protocols up to 2 write Python 2's names.
            return ADMITTED[module.replace("__builtin__", "builtins"), name]
        except KeyError:
            raise UserError(
                f"{self._path}: holds a {module}.{name}, which loading would execute: rejected",
                HINT,
                Code.UNSAFE,
            ) from None


def _empty(kind: object, shape: object, code: object) -> NDArray[Any]:
    """The empty array that a pickled array starts as; the bytes of its state, which follows, have
    to fit its shape."""
    if kind != NDARRAY or shape != (0,):
        raise ValueError(f"an array that begins with the shape {shape}")
    empty: NDArray[Any] = np.empty(0, np.int8)
    return empty


def _dtype(*arguments: Any) -> Any:
    """A dtype without Python objects, which could be anything."""
    dtype = np.dtype(*arguments)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return dtype


def _bytes(text: str, encoding: str) -> bytes:
    """The function that protocol 2 calls to make bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes in {encoding}")
    return text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("numpy._core.multiarray", "_reconstruct"): _empty,  # numpy 2's
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("_codecs", "encode"): _bytes,
}


def _array(name: object, value: Any, path: str) -> NDArray[Any]:
    """A parameter's value: an array, or Paddle's pair of its name and an array."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise UserError(
            f"{path}: {name} is a {type(value).__name__}, not a tensor", HINT, Code.MALFORMED
        )
    if value.dtype == np.uint16:  # bfloat16, the upper half of a float32
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value
