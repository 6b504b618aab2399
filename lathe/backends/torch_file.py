"""Reads `torch.save`'s files without torch, and without executing anything that is in them.

A file is a zip archive of stored entries: `NAME/data.pkl`, a pickle, and `NAME/data/KEY`, the bytes
of a storage, of which tensors are views. Before torch 1.6 it was a sequence of pickles, followed by
the storages. Source: torch/serialization.py of torch 2.13.
"""

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lathe.backends.torch_pickle import BFLOAT16, Storage, TensorsOnly, TensorView
from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import open_file

HINT = "copy the file again"
MAX_PICKLE_BYTES = 1 << 28  # tensors are not in it: that of a large model takes megabytes
ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


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
            count, values = view.n_elements, self._storage(view.storage)
            if not count:
                return np.empty(view.shape, values.dtype)
            strides = [s * values.itemsize for s in view.stride]
            view_array = np.lib.stride_tricks.as_strided(values[view.offset :], view.shape, strides)
            if view.storage.type.dtype == BFLOAT16:
                return (view_array.astype(np.uint32) << 16).view(np.float32)
            return view_array.copy()

    def _storage(self, storage: Storage) -> NDArray[Any]:
        """The elements of a storage. The last one stays in memory: consecutive tensors may be views
        of one large storage."""
        if self._last is None or self._last[0] != storage.key:
            dtype = storage.type.stored
            expected = storage.numel * dtype.itemsize
            data = self._stored_bytes(storage.key, expected)
            if len(data) != expected:
                raise ValueError(f"a storage has {len(data):,} bytes, not {expected:,}")
            self._last = storage.key, np.frombuffer(data, dtype)
        return self._last[1]

    def _stored_bytes(self, key: str, expected: int) -> bytes:
        if self._archive is not None:
            return self._entry(f"{self._root}data/{key}", expected)
        if key not in self._starts:
            raise ValueError("a storage is missing")
        self._file.seek(self._starts[key])
        return self._file.read(expected)

    def _open_zip(self) -> Any:
        self._archive = archive = zipfile.ZipFile(self._file)
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
        keys = TensorsOnly(file).load()
        if not isinstance(keys, list):
            raise ValueError("no list of storages")
        for key in keys:
            storage = unpickler.storages.get(key) if isinstance(key, str) else None
            (numel,) = struct.unpack("<q", file.read(8))
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
