"""PaddleNLP's token files: `X_ids.npy` (all tokens) and `X_idx.npz` (`lens`, `docs`).

`lens` is int32, the tokens of each sequence; `docs` int64, cumulative from 0 on, is written and
not used. Source: PaddleFleetX, `ppfleetx/data/data_tools/gpt/preprocess_data.py`.
"""

import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from lathe.data.megatron import TokenArrays
from lathe.errors import UserError

U16_BELOW = 65535


class PaddleWriter:
    """Appends documents of one sequence each; header and lengths are written when the block ends.

    Tokens are u16 when `vocab_size` < 65,535, else i32. Memory: 4 bytes a document.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.files = (
            prefix.with_name(f"{prefix.name}_ids.npy"),
            prefix.with_name(f"{prefix.name}_idx.npz"),
        )
        self._dtype = np.dtype("<u2" if vocab_size < U16_BELOW else "<i4")
        self.sizes = array("i")
        self._ids = self.files[0].open("wb")
        _write_header(self._ids, self._dtype, 0)
        self._body = self._ids.tell()

    def append(self, tokens: Sequence[int]) -> None:
        self._ids.write(np.asarray(tokens, self._dtype).tobytes())
        self.sizes.append(len(tokens))

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
                docs=np.arange(len(self.sizes) + 1, dtype="<i8"),
            )
        self._ids.close()


def _write_header(file: BinaryIO, dtype: np.dtype, tokens: int) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
    )


def read_paddle(ids_file: Path, idx_file: Path) -> TokenArrays:
    """Map a pair of files.

    Raises:
        UserError: not this format, cut short, or the two do not belong together.
    """
    whole = "copy or prepare the data set again; the file is not whole"
    try:
        tokens = np.load(ids_file, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{ids_file}: cannot be mapped: {error}", whole) from error
    try:
        with np.load(idx_file) as idx:
            lens = idx["lens"].astype(np.int32)
            docs = idx["docs"] if "docs" in idx else np.arange(len(lens) + 1)
    except (ValueError, EOFError, OSError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{idx_file}: cannot be read: {error}", whole) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(
            f"{ids_file}: {tokens.dtype} of shape {tokens.shape}, not one row of token ids",
            "prepare the data set again",
        )
    ends = np.cumsum(lens, dtype=np.int64)
    counted = int(ends[-1]) if len(ends) else 0
    if counted != len(tokens) or (lens < 0).any():
        raise UserError(
            f"{ids_file}: {len(tokens):,} tokens, but {idx_file.name} counts {counted:,}",
            "take both files from one data set",
        )
    return TokenArrays(tokens, ends - lens, lens, docs.astype(np.int64))
