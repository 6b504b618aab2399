"""A token data set: a folder with one pair of token files, a tokenizer and a card."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.megatron import MegatronWriter, TokenArrays, read_megatron
from lathe.data.paddle import PaddleWriter, read_paddle
from lathe.data.tokenizer import eos_id, load_tokenizer, vocab_size
from lathe.errors import UserError

CARD = "data.json"
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
class TokenDataset:
    """Memory-mapped sequences of token ids; `dataset[i]` is the i-th, (sizes[i],), read-only."""

    folder: Path
    card: dict[str, Any]
    arrays: TokenArrays

    @classmethod
    def open(cls, folder: Path) -> "TokenDataset":
        """Map the folder's one pair of files, in either format.

        A folder that another tool wrote has no `data.json`: its card is then made from the files
        and the tokenizer beside them.

        Raises:
            UserError: no such folder, no pair or more than one (names them), half a pair, a file
                cut short, or neither card nor tokenizer.
        """
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder", "give the folder that prepare wrote")
        format, first, second = _find_pair(folder)
        arrays = PAIRS[format][2](first, second)
        if len(arrays.sizes) == 0:
            raise UserError(f"{folder}: a data set without a sequence", "prepare it from some text")
        return cls(folder, _card(folder, format, arrays), arrays)

    @property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(N,) int32, tokens of each sequence."""
        return self.arrays.sizes

    @property
    def vocab_size(self) -> int:
        return int(self.card["vocab_size"])

    @property
    def eos_id(self) -> int:
        return int(self.card["eos_id"])

    def __len__(self) -> int:
        return len(self.arrays.sizes)

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        return self.span(i, 0, int(self.arrays.sizes[i]))

    def span(self, i: int, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Tokens [begin, end) of sequence i, without reading the others."""
        start = self.arrays.starts[i]
        return self.arrays.tokens[start + begin : start + end]


def _find_pair(folder: Path) -> tuple[str, Path, Path]:
    found: list[tuple[str, Path, Path]] = []
    for format, (first, second, _) in PAIRS.items():
        prefixes = {
            path.name.removesuffix(end)
            for end in (first, second)
            for path in folder.glob(f"*{end}")
        }
        found += [
            (format, folder / f"{p}{first}", folder / f"{p}{second}") for p in sorted(prefixes)
        ]
    if not found:
        raise UserError(
            f"{folder}: no token files (.bin with .idx, or _ids.npy with _idx.npz)",
            "give the folder that prepare wrote",
        )
    if len(found) > 1:
        names = ", ".join(f"{a.name} + {b.name}" for _, a, b in found)
        raise UserError(f"{folder}: more than one data set: {names}", "give each its own folder")
    for path in found[0][1:]:
        if not path.is_file():
            raise UserError(f"{path}: missing, its other half is there", "copy both files")
    return found[0]


def _card(folder: Path, format: str, arrays: TokenArrays) -> dict[str, Any]:
    path = folder / CARD
    if not path.is_file():
        tokenizer = load_tokenizer(folder)
        return {
            "format": format,
            "documents": len(arrays.sizes),
            "tokens": len(arrays.tokens),
            "vocab_size": vocab_size(tokenizer),
            "eos_id": eos_id(tokenizer),
        }
    try:
        card = json.loads(path.read_bytes())
        counts = (card["documents"], card["tokens"], card["vocab_size"], card["eos_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a data set's card: {error}", "run prepare again") from error
    if counts[:2] != (len(arrays.sizes), len(arrays.tokens)):
        raise UserError(
            f"{path}: counts {counts[0]:,} documents and {counts[1]:,} tokens, the files hold "
            f"{len(arrays.sizes):,} and {len(arrays.tokens):,}",
            "take card and files from one data set",
        )
    assert isinstance(card, dict)
    return card
