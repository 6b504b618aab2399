"""PaddleNLP's token files: `X_ids.npy` (all tokens) and `X_idx.npz` (`lens`, `docs`).

`lens` is int32, the tokens of each sequence; `docs` int64, cumulative sequence counts of the
documents from 0 on, which PaddleFleetX writes and does not use.
Source: PaddleFleetX, `ppfleetx/data/data_tools/gpt/preprocess_data.py`.
"""

import logging
import zipfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lathe.data.megatron import TokenArrays, cumulative
from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.inputs import require_file

log = logging.getLogger("lathe")

U16_BELOW = 65535  # as in PaddleFleetX's `preprocess_data.py`
SPARE_SEQUENCES = 1024  # without a token
WHOLE = "copy or prepare the data set again; the file is truncated"


class PaddleWriter:
    """Appends documents of one or more sequences; header and lengths are written when the block
    ends.

    Tokens are u16 when `vocab_size` < 65,535, else i32. Memory: see `MegatronWriter`.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.files = (
            prefix.with_name(f"{prefix.name}_ids.npy"),
            prefix.with_name(f"{prefix.name}_idx.npz"),
        )
        self._dtype = np.dtype("<u2" if vocab_size < U16_BELOW else "<i4")
        self.sizes, self.sequences = array("i"), array("i")
        self._ids = self.files[0].open("wb")
        _write_header(self._ids, self._dtype, 0)
        self._body = self._ids.tell()

    def append(self, tokens: Sequence[int]) -> None:
        """Append a document of one sequence."""
        self.extend(np.asarray(tokens, self._dtype), [len(tokens)])

    def extend(
        self, ids: NDArray[Any], sizes: Sequence[int], sequences: Iterable[int] | None = None
    ) -> None:
        """See `MegatronWriter.extend`."""
        self._ids.write(ids.astype(self._dtype).data)
        self.sizes.extend(sizes)
        self.sequences.extend(repeat(1, len(sizes)) if sequences is None else sequences)

    def __enter__(self) -> "PaddleWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            # numpy pads the header to one length whatever the count of tokens.
            self._ids.seek(0)
            _write_header(self._ids, self._dtype, sum(self.sizes))
            assert self._ids.tell() == self._body
            np.savez(
                self.files[1],
                lens=np.array(self.sizes, "<i4"),
                docs=cumulative(self.sequences),
            )
        self._ids.close()


def _write_header(file: BinaryIO, dtype: np.dtype, tokens: int) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
    )


def read_paddle(ids_file: Path, idx_file: Path) -> TokenArrays:
    """Memory-map a pair of files. Without `docs`, or with some that do not fit the sequences, every
    sequence is a document.

    Raises:
        UserError: another format, truncated, or two files that do not belong together.
    """
    require_file(ids_file)
    require_file(idx_file)
    try:
        tokens = np.lib.format.open_memmap(ids_file, mode="r")
    except OSError as error:
        raise explain_os_error(error, ids_file) from error
    except Exception as error:  # a broken header raises whatever its bytes lead to
        raise UserError(f"{ids_file}: cannot be mapped: {error}", WHOLE, Code.MALFORMED) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.dtype.isnative:
        raise UserError(
            f"{ids_file}: {tokens.dtype} of shape {tokens.shape}, not one row of token ids",
            "prepare the data set again, with little-endian integers",
            Code.MALFORMED,
        )
    try:
        with zipfile.ZipFile(idx_file) as archive:
            lens = _read_row(archive, "lens", len(tokens))
            has_docs = "docs.npy" in archive.namelist()
            docs = _read_row(archive, "docs", len(tokens)) if has_docs else np.arange(len(lens) + 1)
    except OSError as error:
        raise explain_os_error(error, idx_file) from error
    except Exception as error:  # `zipfile` raises what its decompressors raise
        raise UserError(f"{idx_file}: cannot be read: {error}", WHOLE, Code.MALFORMED) from error
    if (lens < 0).any() or (lens > np.iinfo(np.int32).max).any():
        raise UserError(f"{idx_file}: lens contains invalid lengths", WHOLE, Code.CORRUPT)
    # Each sequence begins where the one before it ends, and the last one ends with the file.
    ends = np.cumsum(lens)
    counted = int(ends[-1]) if len(ends) else 0
    if counted != len(tokens):
        raise UserError(
            f"{ids_file}: {len(tokens):,} tokens, but {idx_file.name} lists {counted:,}",
            "use both files of the same data set",
            Code.MISMATCH,
        )
    is_range = len(docs) > 0 and docs[0] == 0 and docs[-1] == len(lens)
    if not (is_range and (docs[1:] >= docs[:-1]).all()):
        log.warning("%s: ignoring docs, which does not fit its %d sequences", idx_file, len(lens))
        docs = np.arange(len(lens) + 1)
    return TokenArrays(tokens, ends - lens, lens.astype(np.int32), docs)


def _read_row(archive: zipfile.ZipFile, name: str, tokens: int) -> NDArray[np.int64]:
    """Read an array of integers from an `.npz`, no longer than the number of tokens.

    Its length is checked before unpacking, since a small archive may unpack to any size.
    """
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read_header(member)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ValueError(f"{name} is {dtype} of shape {shape}, not one row of integers")
        if not 0 <= shape[0] <= 2 * tokens + SPARE_SEQUENCES:
            raise ValueError(f"{name} has {shape[0]:,} numbers for {tokens:,} tokens")
        data = member.read(shape[0] * dtype.itemsize)
    if len(data) != shape[0] * dtype.itemsize:
        raise ValueError(f"{name} is truncated")
    return np.frombuffer(data, dtype).astype(np.int64)
