"""Megatron's memory-mapped token files: `PREFIX.bin` and `PREFIX.idx`, little-endian.

The index: `MMIDIDX\0\0`, u64 version 1, u8 dtype code, u64 N sequences, u64 D, then int32[N]
sizes in tokens, int64[N] byte pointers into `.bin`, int64[D] cumulative sequence counts of the
documents from 0 on, and in newer files int8[N] modes. `.bin` is nothing but the tokens.
Lathe's own `PREFIX.mask`, beside those of conversations, has a byte for every token of `.bin`: 1 if
the assistant writes it, else 0.
Source: Megatron-LM, `megatron/data/indexed_dataset.py`.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_base.inputs import open_file

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOAT_CODES = (6, 7)
U16_BELOW = 65500  # as in Megatron's `best_fitting_dtype`
CHECKED_TOKENS = 1 << 24
"""Number of tokens whose ids are checked at a time."""


class TokenArrays(NamedTuple):
    """Contents of a pair of token files, in either format."""

    tokens: np.ndarray[Any, Any]  # (sum of sizes,) memory-mapped
    starts: np.ndarray[Any, Any]  # (N,) int64, position of each sequence's first token
    sizes: np.ndarray[Any, Any]  # (N,) int32, tokens of each sequence
    doc_idx: np.ndarray[Any, Any]  # (D,) int64, cumulative sequence counts from 0 on
    modes: np.ndarray[Any, Any] | None = None  # (N,) int8
    mask: np.ndarray[Any, Any] | None = None  # like tokens, u1: 1 if written by the assistant

    @property
    def document_bounds(self) -> np.ndarray[Any, Any]:
        """(documents + 1,) int64, the first sequence of each document, and the number of sequences.

        Documents without a sequence are not counted: Megatron's tools list those without text.
        Without document marks every sequence is a document.
        """
        if not len(self.doc_idx):
            return np.arange(len(self.sizes) + 1)
        has_sequences = np.diff(self.doc_idx) > 0
        if has_sequences.all():
            return self.doc_idx
        bounds: np.ndarray[Any, Any] = self.doc_idx[np.append(True, has_sequences)]
        return bounds

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_bounds) - 1

    @property
    def document_sizes(self) -> np.ndarray[Any, Any]:
        """(documents,) tokens of each document."""
        bounds = self.document_bounds
        if len(bounds) == len(self.sizes) + 1:
            return self.sizes
        return np.add.reduceat(self.sizes, bounds[:-1], dtype=np.int64)

    def containing_document(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return int(np.searchsorted(self.document_bounds, sequence, side="right")) - 1


class MegatronWriter:
    """Appends documents of one or more sequences; the index is written when the block ends.

    Tokens are u16 when `vocab_size` < 65,500, else i32. Memory: 4 bytes per sequence, and 4 per
    document.

    Args:
        has_mask: whether every token comes with whether the assistant writes it.

    Attributes:
        sizes: tokens of each sequence so far.
        sequences: number of sequences of each document so far.
    """

    def __init__(self, prefix: Path, vocab_size: int, has_mask: bool = False) -> None:
        self.files = (
            prefix.with_name(f"{prefix.name}.bin"),
            prefix.with_name(f"{prefix.name}.idx"),
        )
        self._code = 8 if vocab_size < U16_BELOW else 4
        self._dtype = np.dtype(TOKEN_DTYPES[self._code])
        self.sizes, self.sequences = array("i"), array("i")
        self._bin = self.files[0].open("wb")
        self._mask = self.files[0].with_suffix(".mask").open("wb") if has_mask else None

    def append(self, tokens: Sequence[int]) -> None:
        """Append a document of one sequence."""
        self.extend(np.asarray(tokens, self._dtype), [len(tokens)])

    def extend(
        self,
        ids: NDArray[Any],
        sizes: Sequence[int],
        sequences: Iterable[int] | None = None,
        mask: NDArray[Any] | None = None,
    ) -> None:
        """Append sequences of these sizes, whose ids are concatenated.

        Args:
            sequences: number of sequences of each document; None if every document is one.
            mask: like `ids`, whether the assistant writes each.
        """
        self._bin.write(ids.astype(self._dtype).data)
        if self._mask is not None:
            assert mask is not None and len(mask) == len(ids)
            self._mask.write(mask.astype("u1").data)
        self.sizes.extend(sizes)
        self.sequences.extend(repeat(1, len(sizes)) if sequences is None else sequences)

    def __enter__(self) -> "MegatronWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bin.close()
        if self._mask is not None:
            self._mask.close()
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        sizes = np.array(self.sizes, "<i4")
        n = len(sizes)
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        with self.files[1].open("wb") as f:
            f.write(HEADER.pack(MAGIC, 1, self._code, n, len(self.sequences) + 1))
            f.write(sizes.tobytes())
            f.write(np.concatenate(([0], ends[:-1])).astype("<i8")[:n].tobytes())
            f.write(cumulative(self.sequences).tobytes())


def cumulative(counts: Sequence[int]) -> NDArray[np.int64]:
    """(n + 1,) sums of the first 0, 1, ... n counts."""
    sums = np.zeros(len(counts) + 1, "<i8")
    np.cumsum(counts, out=sums[1:])
    return sums


def read_megatron(bin_file: Path, idx_file: Path) -> TokenArrays:
    """Memory-map a pair of files.

    Raises:
        UserError: another format, truncated, or two files that do not belong together.
    """
    # The header, and a length that fits its counts.
    with open_file(idx_file) as file:
        index = file.read()
    if len(index) < HEADER.size or not index.startswith(MAGIC):
        raise UserError(
            f"{idx_file}: not a Megatron index", "give the .idx of a mmap data set", Code.MALFORMED
        )
    _, version, code, n, d = HEADER.unpack_from(index)
    if version != 1:
        raise UserError(
            f"{idx_file}: unsupported version {version}; only 1 is supported",
            "convert the data set",
            Code.WRONG_VERSION,
        )
    if code in FLOAT_CODES or code not in TOKEN_DTYPES:
        raise UserError(
            f"{idx_file}: dtype code {code} is not an integer type",
            "write tokens as u16",
            Code.UNSUPPORTED,
        )
    plain = HEADER.size + 12 * n + 8 * d
    if len(index) not in (plain, plain + n):
        raise UserError(
            f"{idx_file}: {len(index):,} bytes, but {n:,} sequences and {d:,} document marks "
            f"take {plain:,}, or {plain + n:,} with modes",
            "copy or prepare the data set again; the file is truncated",
            Code.CORRUPT,
        )
    # The arrays of the index, which are views of its bytes; the tokens stay on the disk.
    dtype = np.dtype(TOKEN_DTYPES[code])
    sizes = np.frombuffer(index, "<i4", n, HEADER.size)
    pointers = np.frombuffer(index, "<i8", n, HEADER.size + 4 * n)
    doc_idx = np.frombuffer(index, "<i8", d, HEADER.size + 12 * n)
    modes = np.frombuffer(index, "<i1", n, plain) if len(index) > plain else None
    size = bin_file.stat().st_size
    _require_one_data_set(bin_file, idx_file, size, dtype.itemsize, sizes, pointers, doc_idx)
    tokens = np.memmap(bin_file, dtype, "r") if size else np.zeros(0, dtype)  # mmap takes no 0
    mask, mask_file = None, bin_file.with_suffix(".mask")
    if size and mask_file.is_file():
        mask = np.memmap(mask_file, "u1", "r") if mask_file.stat().st_size else np.zeros(0, "u1")
        if len(mask) != len(tokens):
            raise UserError(
                f"{mask_file}: {len(mask):,} bytes for {len(tokens):,} tokens",
                "copy or prepare the data set again; the file is truncated",
                Code.CORRUPT,
            )
    return TokenArrays(tokens, pointers // dtype.itemsize, sizes, doc_idx, modes, mask)


def _require_one_data_set(
    bin_file: Path,
    idx_file: Path,
    size: int,
    itemsize: int,
    sizes: NDArray[np.int32],
    pointers: NDArray[np.int64],
    doc_idx: NDArray[np.int64],
) -> None:
    """Raise UserError unless the arrays of an index describe a `.bin` of `size` bytes."""
    needed = int(sizes.sum(dtype=np.int64)) * itemsize
    if size != needed:
        hint = "copy or prepare the data set again; one of the two is truncated"
        if size - needed == np.count_nonzero(np.diff(doc_idx)) * itemsize:
            hint = (
                "prepare the data set again: as of Megatron-DeepSpeed's preprocess_data.py with "
                "--append-eod, it does not count the end-of-text token of any document"
            )
        raise UserError(
            f"{bin_file}: {size:,} bytes, but {idx_file.name} lists {needed:,}", hint, Code.CORRUPT
        )
    # Sequences may be in any order in `.bin`, but within it, and none in another.
    lengths = sizes.astype(np.int64) * itemsize
    inside = (sizes >= 0) & (pointers >= 0) & (pointers <= size - lengths)
    if not inside.all() or (pointers % itemsize).any():
        raise UserError(
            f"{idx_file}: points outside {bin_file.name}",
            "prepare the data set again",
            Code.CORRUPT,
        )
    order = np.argsort(pointers, kind="stable")
    if (pointers[order][1:] < (pointers + lengths)[order][:-1]).any():
        raise UserError(
            f"{idx_file}: sequences overlap", "prepare the data set again", Code.CORRUPT
        )
    if len(doc_idx) and (
        doc_idx[0] != 0 or doc_idx[-1] != len(sizes) or (doc_idx[1:] < doc_idx[:-1]).any()
    ):
        raise UserError(
            f"{idx_file}: invalid document boundaries for {len(sizes):,} sequences",
            "prepare the data set again",
            Code.CORRUPT,
        )


def check_ids(arrays: TokenArrays, vocab_size: int, where: Path) -> None:
    """Read all tokens once, a block in memory at a time: about a second for a billion of them.

    Args:
        where: the data set, for the message.

    Raises:
        UserError: an id that is negative, or not below `vocab_size`; names the first one's
            document, counted from 0.
    """
    for begin in range(0, len(arrays.tokens), CHECKED_TOKENS):
        block = arrays.tokens[begin : begin + CHECKED_TOKENS]
        if int(block.min()) >= 0 and int(block.max()) < vocab_size:
            continue
        first = int(np.argmax((block < 0) | (block >= vocab_size)))
        position = begin + first
        inside = (arrays.starts <= position) & (position < arrays.starts + arrays.sizes)
        document = arrays.containing_document(int(np.argmax(inside)))
        raise UserError(
            f"{where}: document {document} contains token {int(block[first])}, but "
            f"the largest id of the vocabulary is {vocab_size - 1}",
            "use tokens and tokenizer of the same data set, or prepare it again",
            Code.WRONG_TOKENIZER,
        )
