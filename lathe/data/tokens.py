"""A token data set: a folder with one pair of token files, a tokenizer and a metadata file.

A blend is a folder of such folders, whose metadata gives each a weight.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.megatron import MegatronWriter, TokenArrays, check_ids, read_megatron
from lathe.data.paddle import PaddleWriter, read_paddle
from lathe.data.tokenizer import eos_id, load_tokenizer, tokenizer_files, vocab_size
from lathe_base.artifacts.kinds import DATA, check_files, read_metadata
from lathe_base.artifacts.metadata import DataMetadata
from lathe_base.errors import Code, UserError
from lathe_base.storage import digest
from lathe_base.storage.files import once
from lathe_base.storage.ownership import REPLACED

HINT = "run prepare, or blend, again"
WRITERS: dict[str, type[MegatronWriter] | type[PaddleWriter]] = {
    "megatron": MegatronWriter,
    "paddle": PaddleWriter,
}
# Format: the endings of its two files and their reader.
Reader = Callable[[Path, Path], TokenArrays]
PAIRS: dict[str, tuple[str, str, Reader]] = {
    "megatron": (".bin", ".idx", read_megatron),
    "paddle": ("_ids.npy", "_idx.npz", read_paddle),
}


@dataclass(frozen=True)
class TokenDataset(ABC):
    """Base class of plain data sets and blends."""

    folder: Path
    metadata: dict[str, Any]
    bos: tuple[int, ...] = field(default=(), kw_only=True)
    """Replaces the first token of every sample; see `lathe.train.batches.open_data`."""

    @staticmethod
    def open(folder: Path) -> "TokenSequences | TokenBlend":
        """Open a folder's pair of token files, in either format, or each part of a blend.

        A folder written by another tool has no `data.json`; its metadata is then derived from the
        files and the tokenizer beside them. Without one, its ids are checked by `require_ids`.

        Raises:
            UserError: no such folder, no pair, an incomplete pair or several (named), or a file
                that is truncated or altered.
        """
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder", "give the folder that prepare wrote", Code.NOT_FOUND
            )
        metadata = read_data_metadata(folder)
        if metadata is not None and metadata.blend:
            return _open_blend(folder, metadata)
        return _open_sequences(folder, metadata.raw if metadata else None)

    @property
    @abstractmethod
    def parts(self) -> Sequence[tuple[float, "TokenSequences"]]:
        """The parts to sample from and their weights."""

    @property
    def digest(self) -> str:
        """Digest of the metadata, which identifies the data set."""
        return digest(json.dumps(self.metadata, sort_keys=True))

    @property
    def has_vocabulary(self) -> bool:
        """Whether the vocabulary is known: from metadata, or from a tokenizer beside the tokens."""
        return "vocab_size" in self.metadata

    @property
    def vocab_size(self) -> int:
        """Number of ids, one more than the largest.

        Raises:
            UserError: the folder was written by another tool, and no tokenizer is beside it.
        """
        if not self.has_vocabulary:
            raise without_tokenizer(self.folder)
        return int(self.metadata["vocab_size"])

    @property
    def eos_id(self) -> int:
        """The id of `<|endoftext|>`."""
        return int(self.metadata["eos_id"])

    def require_ids(self, vocab_size: int) -> None:
        """Raise UserError if a part has an id that is not below `vocab_size`."""
        for _, part in self.parts:
            if is_first_on_node():
                _check_ids(part.folder, _find_pair(part.folder)[1], part.arrays, vocab_size)


@dataclass(frozen=True)
class TokenSequences(TokenDataset):
    """Memory-mapped sequences of token ids; `dataset[i]` is the i-th, (sizes[i],), read-only.

    A document is one sequence, or one for each of its sentences.
    """

    arrays: TokenArrays

    @property
    def parts(self) -> Sequence[tuple[float, "TokenSequences"]]:
        return [(1.0, self)]

    @property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(N,) int32, tokens of each sequence."""
        return self.arrays.sizes

    def __len__(self) -> int:
        return len(self.arrays.sizes)

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        return self.span(i, 0, int(self.arrays.sizes[i]))

    def span(self, i: int, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Tokens [begin, end) of sequence i, without reading the others."""
        start = self.arrays.starts[i]
        return self.arrays.tokens[start + begin : start + end]

    @property
    def has_mask(self) -> bool:
        """Whether these are conversations, with a mask of the assistant's tokens."""
        return self.arrays.mask is not None

    def mask(self, i: int) -> np.ndarray[Any, Any]:
        """(sizes[i],) 1 for each token of sequence i that the assistant writes, else 0."""
        assert self.arrays.mask is not None
        start = self.arrays.starts[i]
        return self.arrays.mask[start : start + self.arrays.sizes[i]]


@dataclass(frozen=True)
class TokenBlend(TokenDataset):
    """Data sets of one tokenizer, each with its weight."""

    weighted: tuple[tuple[float, TokenSequences], ...]

    @property
    def parts(self) -> Sequence[tuple[float, TokenSequences]]:
        return self.weighted


def read_data_metadata(folder: Path) -> DataMetadata | None:
    """Read the metadata, if any, and verify the files that it lists.

    Raises:
        UserError: a file was altered, or the metadata is broken.
    """
    path = folder / DATA.metadata_file
    if (folder / REPLACED).exists():
        raise UserError(
            f"{folder}: incomplete, because a write was interrupted", HINT, Code.INCOMPLETE
        )
    if not os.path.lexists(path):
        return None
    metadata = read_metadata(path, DataMetadata, HINT)
    if is_first_on_node():
        check_files(folder, DATA.metadata_file, metadata.files, HINT)
    return metadata


def _open_blend(folder: Path, blend: DataMetadata) -> TokenBlend:
    metadata, weights = blend.raw, {part.folder: part.weight for part in blend.blend}
    digests = {part.folder: part.metadata_sha256 for part in blend.blend}
    weighted = []
    for name, weight in weights.items():
        part = TokenDataset.open(folder / name)
        if not isinstance(part, TokenSequences):
            raise UserError(
                f"{part.folder}: is itself a blend", "blend its parts instead", Code.WRONG_KIND
            )
        weighted.append((weight, part))
        # Blends of earlier versions do not say which data set a part was.
        if (said := digests[name]) and said != part.digest:
            raise UserError(f"{part.folder}: has changed since it was blended", HINT, Code.MISMATCH)
    widest = max(part.vocab_size for _, part in weighted)
    if blend.vocab_size < widest:
        raise UserError(
            f"{folder / DATA.metadata_file}: vocab_size {blend.vocab_size}, but a part "
            f"has {widest}",
            HINT,
            Code.MISMATCH,
        )
    documents = sum(part.arrays.documents for _, part in weighted)
    tokens = sum(len(part.arrays.tokens) for _, part in weighted)
    _check_counts(folder, metadata, documents, tokens)
    return TokenBlend(folder, metadata, tuple(weighted))


def _open_sequences(folder: Path, metadata: dict[str, Any] | None) -> TokenSequences:
    format, first, second = _find_pair(folder)
    arrays = PAIRS[format][2](first, second)
    documents, tokens = arrays.documents, len(arrays.tokens)
    if documents == 0:
        raise UserError(
            f"{folder}: an empty data set",
            "prepare it from a corpus with text",
            Code.TOO_LITTLE_DATA,
        )
    if metadata is None:  # of another tool
        metadata = {"format": format, "documents": documents, "tokens": tokens}
        if tokenizer_files(folder):
            tokenizer = load_tokenizer(folder)
            metadata |= {"vocab_size": vocab_size(tokenizer), "eos_id": eos_id(tokenizer)}
    _check_counts(folder, metadata, documents, tokens)
    if "vocab_size" in metadata and is_first_on_node():
        _check_ids(folder, first, arrays, int(metadata["vocab_size"]))
    return TokenSequences(folder, metadata, arrays)


def without_tokenizer(folder: Path) -> UserError:
    """The error for token files of another tool whose tokenizer is needed and not there."""
    return UserError(
        f"{folder}: token files without a tokenizer, so what the ids mean is unknown",
        "give it to `lathe pretrain` with --tokenizer PATH, or put it beside the tokens: "
        "tokenizer.json, vocab.json with merges.txt, or gpt2-vocab.json with gpt2-merges.txt",
        Code.INCOMPLETE,
    )


def is_first_on_node() -> bool:
    """Whether this process verifies the files: one process per node does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _check_ids(folder: Path, file: Path, arrays: TokenArrays, vocab_size: int) -> None:
    # Remembered for a large file: the next command does not read all of its ids again.
    def check(_: Path) -> bool:
        check_ids(arrays, vocab_size, folder)
        return True

    once(file, f"ids below {vocab_size}", check)


def _find_pair(folder: Path) -> tuple[str, Path, Path]:
    # One file of two makes a pair, whose other file is then reported as missing.
    pairs: list[tuple[str, Path, Path]] = []
    for format, (first, second, _) in PAIRS.items():
        prefixes = {
            path.name.removesuffix(end)
            for end in (first, second)
            for path in folder.glob(f"*{end}")
        }
        pairs += [
            (format, folder / f"{p}{first}", folder / f"{p}{second}") for p in sorted(prefixes)
        ]
    if not pairs:
        raise UserError(
            f"{folder}: no token files (.bin with .idx, or _ids.npy with _idx.npz)",
            "give the folder that prepare wrote",
            Code.WRONG_KIND,
        )
    if len(pairs) > 1:
        names = ", ".join(f"{a.name} + {b.name}" for _, a, b in pairs)
        raise UserError(
            f"{folder}: more than one data set: {names}", "give each its own folder", Code.AMBIGUOUS
        )
    for path in pairs[0][1:]:
        if not path.is_file():
            raise UserError(
                f"{path}: missing, but the other file exists", "copy both files", Code.INCOMPLETE
            )
    return pairs[0]


def _check_counts(folder: Path, metadata: dict[str, Any], documents: int, tokens: int) -> None:
    if (metadata["documents"], metadata["tokens"]) != (documents, tokens):
        raise UserError(
            f"{folder / DATA.metadata_file}: counts {metadata['documents']:,} documents and "
            f"{metadata['tokens']:,} tokens, but the files contain {documents:,} and {tokens:,}",
            "use metadata and files of the same data set",
            Code.MISMATCH,
        )
