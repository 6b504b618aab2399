"""A token data set: a folder with one pair of token files, a tokenizer and a card.

A blend is a folder of such folders, whose card gives each a weight.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.megatron import MegatronWriter, TokenArrays, read_megatron
from lathe.data.paddle import PaddleWriter, read_paddle
from lathe.data.tokenizer import eos_id, load_tokenizer, vocab_size
from lathe.errors import UserError
from lathe.storage import digest

CARD = "data.json"
COUNTS = ("documents", "tokens", "vocab_size", "eos_id")
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
    """What a plain data set and a blend have in common."""

    folder: Path
    card: dict[str, Any]

    @staticmethod
    def open(folder: Path) -> "TokenSequences | TokenBlend":
        """Map the folder's one pair of files, in either format, or each part of a blend.

        A folder that another tool wrote has no `data.json`: its card is then made from the files
        and the tokenizer beside them.

        Raises:
            UserError: no such folder, no pair or more than one (names them), half a pair, a file
                cut short, or neither card nor tokenizer.
        """
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder", "give the folder that prepare wrote")
        card, weights = _read_card(folder)
        if card is not None and weights:
            return _open_blend(folder, card, weights)
        return _open_sequences(folder, card)

    @property
    @abstractmethod
    def parts(self) -> Sequence[tuple[float, "TokenSequences"]]:
        """What to draw samples from, and how often in proportion to each other."""

    @property
    def digest(self) -> str:
        """Of the card, which tells one data set from another."""
        return digest(json.dumps(self.card, sort_keys=True))

    @property
    def vocab_size(self) -> int:
        return int(self.card["vocab_size"])

    @property
    def eos_id(self) -> int:
        return int(self.card["eos_id"])


@dataclass(frozen=True)
class TokenSequences(TokenDataset):
    """Memory-mapped sequences of token ids; `dataset[i]` is the i-th, (sizes[i],), read-only."""

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


@dataclass(frozen=True)
class TokenBlend(TokenDataset):
    """Data sets of one tokenizer, each with its weight."""

    weighted: tuple[tuple[float, TokenSequences], ...]

    @property
    def parts(self) -> Sequence[tuple[float, TokenSequences]]:
        return self.weighted


def _read_card(folder: Path) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """The card, if there is one, and of a blend the weight of each folder inside."""
    path = folder / CARD
    if not path.is_file():
        return None, {}
    try:
        card: dict[str, Any] = json.loads(path.read_bytes())
        if not all(isinstance(card[key], int) for key in COUNTS):
            raise ValueError(f"not all of {', '.join(COUNTS)} are whole numbers")
        weights = {str(part["folder"]): float(part["weight"]) for part in card.get("blend", ())}
        if not all(weight > 0 and Path(name).name == name for name, weight in weights.items()):
            raise ValueError(f"blend {weights}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cure = "run prepare, or blend, again"
        raise UserError(f"{path}: not a data set's card: {error}", cure) from error
    return card, weights


def _open_blend(folder: Path, card: dict[str, Any], weights: dict[str, float]) -> TokenBlend:
    weighted = []
    for name, weight in weights.items():
        part = TokenDataset.open(folder / name)
        if not isinstance(part, TokenSequences):
            raise UserError(f"{part.folder}: a blend within a blend", "blend its parts themselves")
        weighted.append((weight, part))
    documents = sum(len(part) for _, part in weighted)
    tokens = sum(len(part.arrays.tokens) for _, part in weighted)
    _check_counts(folder, card, documents, tokens)
    return TokenBlend(folder, card, tuple(weighted))


def _open_sequences(folder: Path, card: dict[str, Any] | None) -> TokenSequences:
    format, first, second = _find_pair(folder)
    arrays = PAIRS[format][2](first, second)
    documents, tokens = len(arrays.sizes), len(arrays.tokens)
    if documents == 0:
        raise UserError(f"{folder}: a data set without a sequence", "prepare it from some text")
    if card is None:
        tokenizer = load_tokenizer(folder)
        card = {
            "format": format,
            "documents": documents,
            "tokens": tokens,
            "vocab_size": vocab_size(tokenizer),
            "eos_id": eos_id(tokenizer),
        }
    _check_counts(folder, card, documents, tokens)
    return TokenSequences(folder, card, arrays)


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


def _check_counts(folder: Path, card: dict[str, Any], documents: int, tokens: int) -> None:
    if (card["documents"], card["tokens"]) != (documents, tokens):
        raise UserError(
            f"{folder / CARD}: counts {card['documents']:,} documents and {card['tokens']:,} "
            f"tokens, the files hold {documents:,} and {tokens:,}",
            "take card and files from one data set",
        )
