"""`.pdparams` files without Paddle: pickles in which nothing but arrays and containers is let in.

Paddle saves a dictionary of numpy arrays by parameter name, and with them the table
`StructuredToParameterName@@`. Under protocols 2 and 3 an array above 1 GB is cut into slices,
which `UnpackBigParamInfor@@` lists. bfloat16 is stored as its bits, in uint16.
"""

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lathe.errors import UserError
from lathe.storage import atomic_file

NAMES = "StructuredToParameterName@@"
SLICES = "UnpackBigParamInfor@@"
PROTOCOL = 4

try:
    from numpy._core.multiarray import _reconstruct
except ModuleNotFoundError:  # numpy 1
    from numpy.core.multiarray import _reconstruct  # type: ignore[no-redef]


def read_pdparams(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name, floats as they are, bfloat16 widened to float32.

    Raises:
        UserError: no such file, none of this kind, or one with anything but arrays in it.
    """
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, path).load()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "give a .pdparams file") from None
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise UserError(f"{path}: not a .pdparams file: {error}", "copy the file again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, not tensors by name", CURE)
    found.pop(NAMES, None)
    for name, part in found.pop(SLICES, {}).items():
        pieces = [found.pop(piece) for piece in part["slices"]]
        found[name] = np.concatenate([p.ravel() for p in pieces]).reshape(part["OriginShape"])
    return {str(name): _array(name, value, path) for name, value in found.items()}


def write_pdparams(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write what `paddle.load` reads as a state dictionary."""
    state = {**arrays, NAMES: {name: name for name in arrays}}
    with atomic_file(path) as work, work.open("wb") as file:
        pickle.dump(state, file, PROTOCOL)


CURE = "save the state dictionary of the model alone, as `paddle.save(model.state_dict(), path)`"


class _ArraysOnly(pickle.Unpickler):
    """Lets a pickle name what arrays and plain containers are made of, and nothing else."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module.replace("__builtin__", "builtins"), name]
        except KeyError:
            raise UserError(
                f"{self._path}: holds a {module}.{name}, which loading would run: refused", CURE
            ) from None


def _dtype(*arguments: Any) -> Any:
    """A dtype without objects: those of an object array could be anything."""
    dtype = np.dtype(*arguments)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return dtype


def _bytes(text: str, encoding: str) -> bytes:
    """What protocol 2 calls for bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes in {encoding}")
    return text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("_codecs", "encode"): _bytes,
}


def _array(name: object, value: Any, path: Path) -> NDArray[Any]:
    """A parameter's value: an array, or Paddle's pair of its name and an array."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise UserError(f"{path}: {name} is a {type(value).__name__}, not a tensor", CURE)
    if value.dtype == np.uint16:
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value
