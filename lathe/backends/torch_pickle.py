"""Unpickles what `torch.save` writes without torch, and without executing anything.

The unpickler knows tensors and plain containers. Everything else that a pickle names, be it
`argparse.Namespace` or `os.system`, becomes an inert `Placeholder`, and calling it does nothing.
Source: torch/_utils.py and torch/serialization.py of torch 2.13.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

STORAGES = {
    "HalfStorage": "<f2",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "<u1",
    "CharStorage": "<i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "?",
}
BFLOAT16 = "bfloat16"
MAX_DIMENSIONS = 8


class StorageType(NamedTuple):
    """The type of a storage's elements, numpy's or `bfloat16`."""

    dtype: str

    @property
    def stored(self) -> np.dtype[Any]:
        """numpy's type of the stored bytes; those of bfloat16 are the upper half of a float32."""
        return np.dtype("<u2" if self.dtype == BFLOAT16 else self.dtype)


class Storage(NamedTuple):
    """A storage of `numel` elements in the file."""

    type: StorageType
    key: str
    numel: int


class TensorView(NamedTuple):
    """A tensor: a view of a storage, in elements. Nothing in it has been checked."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements.

        Raises:
            ValueError: it is not a tensor of its storage.
        """
        shape, stride = self.shape, self.stride
        if not isinstance(shape, tuple) or not isinstance(stride, tuple):
            raise ValueError("a tensor's shape is not a tuple")
        sizes = (*shape, *stride, self.offset)
        if (
            len(shape) != len(stride)
            or len(shape) > MAX_DIMENSIONS
            or not all(map(is_count, sizes))
        ):
            raise ValueError("a tensor's shape and strides do not fit")
        count = 1
        for n in shape:
            count *= n
        last = self.offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if count and (last >= self.storage.numel or count > self.storage.numel):
            raise ValueError("a tensor reaches beyond its storage")
        return count


class Placeholder:
    """An object of a class that is not admitted: it keeps its attributes and does nothing.

    It takes what a pickle does with an object: calls, items, and a state.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Placeholder":
        return Placeholder()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, _: Any) -> None:
        """Ignore items of a list."""

    def add(self, _: Any) -> None:
        """Ignore an item of a set."""


class _Call:
    """A function that a pickle may call. It has no attributes, because a pickle can set those of
    whatever it names."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError


class _RebuildTensor(_Call):
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, Storage):
            return Placeholder()
        return TensorView(storage, offset, shape, stride)


class _RebuildParameter(_Call):
    """`_rebuild_parameter(tensor, requires_grad, hooks)`."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return arguments[0]


ADMITTED: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _RebuildTensor(),
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("torch._utils", "_rebuild_parameter_with_state"): _RebuildParameter(),
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()},
}


class TensorsOnly(pickle.Unpickler):
    """Unpickler that finds nothing but what is in `ADMITTED`, and placeholders."""

    def __init__(self, file: BinaryIO | io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}
        self._classes: dict[tuple[str, str], type[Placeholder]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        # A class of its own for this file, because a pickle may set a class's attributes.
        return self._classes.setdefault((module, name), type("Placeholder", (Placeholder,), {}))

    def persistent_load(self, reference: Any) -> Any:
        """A storage: `("storage", type, key, location, numel)`, and `None` in older files."""
        if (
            not isinstance(reference, tuple)
            or len(reference) not in (5, 6)
            or reference[0] != "storage"
        ):
            raise pickle.UnpicklingError("a reference to something else than a storage")
        _, kind, key, _, numel, *view = reference
        if any(part is not None for part in view):
            raise pickle.UnpicklingError("a view of a storage, as before torch 0.4")
        if not isinstance(kind, StorageType):
            return Placeholder()
        if not isinstance(key, str) or not is_count(numel):
            raise pickle.UnpicklingError("a storage without a size")
        return self.storages.setdefault(key, Storage(kind, key, numel))


def is_count(value: Any) -> bool:
    """Whether a value is a whole number that numpy can count to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60
