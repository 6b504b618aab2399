"""Contaminated examples: those of which the model's training text contains much.

A data set of `lathe prepare` has an index of its training text's n-grams. The overlap of an example
is the share of its windows of which an n-gram is in the index (`lathe.data.training_index`); from
`Offline_Eval.contaminated_overlap` on it is marked. Nothing that is in the training text is missed,
and how many clean examples are marked by chance is computed.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]

from lathe.data.tokens import read_data_metadata
from lathe.data.training_index import TrainingIndex
from lathe.evaluate.paired_evaluations import Pair

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Marks:
    """The overlap of every unit of a task's file with the training text.

    Attributes:
        overlap: one for each unit; None where a unit is too short to tell.
        by_chance: units that are expected to be marked although they are clean.
        limit: the overlap from which on a unit is contaminated.
    """

    overlap: tuple[float | None, ...]
    by_chance: float
    limit: float

    def rows(self) -> list[dict[str, Any]]:
        """What the evaluation's file says of each unit."""
        return [
            {"overlap": share, "contaminated": share is not None and share >= self.limit}
            for share in self.overlap
        ]

    def summary(self) -> dict[str, Any]:
        """What `metrics.json` says of them."""
        return {
            "contaminated": sum(row["contaminated"] for row in self.rows()),
            "units": len(self.overlap),
            "too_short": self.overlap.count(None),
            "by_chance": round(self.by_chance, 6),
        }


class TrainingText:
    """The n-gram indexes of a data set: of a blend, one for each part."""

    def __init__(self, indexes: Iterable[TrainingIndex]) -> None:
        self.indexes = tuple(indexes)

    def marks(self, units: Iterable[NDArray[np.integer[Any]]], limit: float) -> Marks:
        """The overlap of units, each (tokens,) ids, with the training text; of a blend, with the
        part that has most of it."""
        shares: list[float | None] = []
        by_chance = 0.0
        rates = [index.rate for index in self.indexes]
        for tokens in units:
            found = []
            for index, rate in zip(self.indexes, rates, strict=True):
                windows = index.windows(tokens)
                if len(windows):
                    found.append(float(windows.mean()))
                    needed = max(1, int(np.ceil(limit * len(windows))))
                    by_chance += float(binom.sf(needed - 1, len(windows), rate))
            shares.append(round(max(found), 4) if found else None)
        return Marks(tuple(shares), by_chance, limit)


def training_text(data: Path | None) -> TrainingText | None:
    """The indexes of a data set; None, which is said, where it has none.

    Raises:
        UserError: an index or the metadata is broken.
    """
    metadata = data and read_data_metadata(data)
    if not data or not metadata:
        return None
    found = []
    for folder in [data / part.folder for part in metadata.blend] or [data]:
        part = read_data_metadata(folder) if metadata.blend else metadata
        if part is None or part.ngrams is None:
            log.info("%s has no n-gram index: examples are not checked for contamination", folder)
            return None
        found.append(TrainingIndex.read(folder, part.ngrams))
    return TrainingText(found)


def statement(name: str, summary: Mapping[str, Any]) -> str | None:
    """Whether a set may be called held out, in words; None if it may."""
    if not summary["contaminated"]:
        return None
    return (
        f"{name}: not held out: the training text contains {summary['contaminated']:,} of its "
        f"{summary['units']:,} units ({summary['by_chance']:.2g} would be marked by chance)"
    )


def without_contaminated(pair: Pair) -> Pair | None:
    """The pair on the units that the training text of neither model contains; None if it contains
    none of them."""
    rows = list(zip(pair.before.rows, pair.after.rows, strict=True))
    clean = [not (a.get("contaminated") or b.get("contaminated")) for a, b in rows]
    if all(clean):
        return None
    before, after = (
        replace(units, rows=[row for row, keep in zip(units.rows, clean, strict=True) if keep])
        for units in (pair.before, pair.after)
    )
    return replace(pair, name=f"{pair.name}, uncontaminated", before=before, after=after)
