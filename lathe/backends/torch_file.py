"""Reads `torch.save`'s files without torch, and without executing anything that is in them.

A file is a zip archive of stored entries: `NAME/data.pkl`, a pickle, and `NAME/data/KEY`, the bytes
of a storage, of which tensors are views. Before torch 1.6 it was a sequence of pickles, followed by
the storages.

The unpickler knows tensors and plain containers. Everything else that a pickle names, be it
`argparse.Namespace` or `os.system`, becomes an inert `Placeholder`, and calling it does nothing.
Sources: torch/serialization.py and torch/_utils.py of torch 2.13.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import open_file

HINT = "copy the file again"
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
MAX_PICKLE_BYTES = 1 << 28  # tensors are not in it: that of a large model takes megabytes
ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def is_count(value: Any) -> bool:
    """Whether a value is a whole number that numpy can count to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60


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
        # Tensors may share a storage; the first reference states its size.
        return self.storages.setdefault(key, Storage(kind, key, numel))


class TorchFile:
    """An open file: `value` is the saved object, with `TensorView`s in it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._archive: zipfile.ZipFile | None = None
        self._root = ""
        self._starts: dict[str, int] = {}
        self._last: tuple[str, NDArray[Any]] | None = None
        with self._explained():
            is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
            file.seek(0)
            self.value = self._open_zip() if is_zip else self._open_legacy()

    def array(self, view: TensorView) -> NDArray[Any]:
        """The values of a tensor, a copy; bfloat16 becomes float32.

        Raises:
            UserError: it reaches beyond its storage, or the storage is not in the file.
        """
        with self._explained():
            count, storage = view.n_elements, view.storage
            # The last storage stays in memory: consecutive tensors may be views of one large one.
            if self._last is None or self._last[0] != storage.key:
                expected = storage.numel * storage.type.stored.itemsize
                if self._archive is not None:
                    data = self._entry(f"{self._root}data/{storage.key}", expected)
                elif storage.key in self._starts:
                    self._file.seek(self._starts[storage.key])
                    data = self._file.read(expected)
                else:
                    raise ValueError("a storage is missing")
                if len(data) != expected:
                    raise ValueError(f"a storage has {len(data):,} bytes, not {expected:,}")
                self._last = storage.key, np.frombuffer(data, storage.type.stored)
            values = self._last[1]
            if not count:
                return np.empty(view.shape, values.dtype)
            strides = [s * values.itemsize for s in view.stride]
            view_array = np.lib.stride_tricks.as_strided(values[view.offset :], view.shape, strides)
            # `n_elements` has checked that the view stays within the storage: numpy does not.
            if storage.type.dtype == BFLOAT16:
                return (view_array.astype(np.uint32) << 16).view(np.float32)
            return view_array.copy()

    def _open_zip(self) -> Any:
        self._archive = archive = zipfile.ZipFile(self._file)
        # zipfile reads the last entry of a name, and other tools the first.
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise ValueError("an entry is there twice")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("no data.pkl: a zip archive, but not one of torch.save")
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in names and self._entry(order) != b"little":
            raise ValueError("saved on a big-endian machine")
        return TensorsOnly(io.BytesIO(self._entry(pickles[0]))).load()

    def _entry(self, name: str, expected: int | None = None) -> bytes:
        """The bytes of an entry, whose checksum is verified."""
        assert self._archive is not None
        try:
            entry = self._archive.getinfo(name)
        except KeyError:
            raise ValueError(f"the entry {printable(name, 60)} is missing") from None
        # torch.save stores; a compressed entry could unpack to more than memory holds.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"the entry {printable(name, 60)} is compressed")
        if expected is None and entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"the entry {printable(name, 60)} is too large")
        if expected is not None and entry.file_size != expected:
            raise ValueError(f"a storage has {entry.file_size:,} bytes, not {expected:,}")
        return self._archive.read(entry)

    def _open_legacy(self) -> Any:
        file = self._file
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if (TensorsOnly(file).load(), TensorsOnly(file).load()) != (
            LEGACY_MAGIC,
            LEGACY_PROTOCOL,
        ):
            raise ValueError("not a file of torch.save")
        TensorsOnly(file).load()  # sizes of C's types on that machine
        unpickler = TensorsOnly(file)
        value = unpickler.load()
        keys = TensorsOnly(file).load()  # in the order of the storages that follow
        if not isinstance(keys, list):
            raise ValueError("no list of storages")
        for key in keys:
            storage = unpickler.storages.get(key) if isinstance(key, str) else None
            (numel,) = struct.unpack("<q", file.read(8))  # before the bytes of each storage
            if storage is None or numel != storage.numel:
                raise ValueError("a storage has another size than its tensors say")
            self._starts[key] = file.tell()
            end = self._starts[key] + numel * storage.type.stored.itemsize
            if end > size:
                raise ValueError("the file is truncated")
            file.seek(end)
        return value

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise a UserError for whatever a broken file leads to."""
        try:
            yield
        except (OSError, UserError):
            raise
        except Exception as error:
            reason = printable(f"{error}" or type(error).__name__, 120)
            what = f"{self.path}: cannot be read as a file of torch.save: {reason}"
            raise UserError(what, HINT, Code.MALFORMED) from None


@contextmanager
def open_torch_file(path: Path) -> Iterator[TorchFile]:
    """Open a file of `torch.save`, in the format of any version; nothing in it is executed.

    Raises:
        UserError: not a regular file, not one of `torch.save`, or truncated.
    """
    with open_file(path, "give a .pt file") as file:
        yield TorchFile(path, file)
