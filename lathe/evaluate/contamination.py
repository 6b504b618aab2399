"""Contaminated examples: those that largely occur in the model's training text.

A data set of `lathe prepare` has an index of its training text's n-grams. The overlap of an example
is the share of its windows with an n-gram in the index (`lathe.data.training_index`); it is marked
if that is at least `Offline_Eval.contaminated_overlap`. Nothing in the training text is missed, and
the expected number of false positives is computed. A data set of conversations has an index of its
prompts instead (`PromptIndex`), in which the prompts of generative tasks are looked up.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]

from lathe.data.tokens import read_data_metadata
from lathe.data.training_index import PromptIndex, TrainingIndex

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Marks:
    """The overlap of every unit of a task's file with the training text.

    Attributes:
        overlap: one for each unit; None if a unit is too short. A prompt of a training
            conversation has an overlap of 1.
        by_chance: expected number of units marked by chance.
        limit: minimum overlap of a contaminated unit.
    """

    overlap: tuple[float | None, ...]
    by_chance: float
    limit: float

    def rows(self) -> list[dict[str, Any]]:
        """The keys added to each unit's line."""
        return [
            {"overlap": share, "contaminated": share is not None and share >= self.limit}
            for share in self.overlap
        ]

    def summary(self) -> dict[str, Any]:
        """Their entry in `metrics.json`."""
        return {
            "contaminated": sum(row["contaminated"] for row in self.rows()),
            "units": len(self.overlap),
            "too_short": self.overlap.count(None),
            "by_chance": round(self.by_chance, 6),
        }


class TrainingText:
    """The indexes of a data set; a blend has one per part.

    Attributes:
        indexes: of n-grams, of the parts that are text.
        prompts: of the parts that are conversations.
    """

    def __init__(
        self, indexes: Iterable[TrainingIndex], prompts: Iterable[PromptIndex] = ()
    ) -> None:
        self.indexes, self.prompts = tuple(indexes), tuple(prompts)

    def marks(
        self, units: Iterable[NDArray[np.integer[Any]]], limit: float, are_prompts: bool = False
    ) -> Marks | None:
        """The overlap of units, each (tokens,) ids, with the training text; for a blend, the
        largest over its parts. None if no index is for such units.

        Args:
            limit: minimum overlap of a contaminated unit.
            are_prompts: whether a unit is a prompt, as a model is given it.
        """
        prompts = self.prompts if are_prompts else ()
        if not (self.indexes or prompts):
            return None
        overlap: list[float | None] = []
        by_chance = 0.0
        rates = [index.rate for index in self.indexes]
        for tokens in units:
            shares = [float(tokens in index) for index in prompts]
            for index, rate in zip(self.indexes, rates, strict=True):
                windows = index.windows(tokens)
                if len(windows):
                    shares.append(float(windows.mean()))
                    # A window matches by chance at the index's rate of false positives, so their
                    # number is binomial; the unit is marked by chance if enough of them do.
                    needed = max(1, int(np.ceil(limit * len(windows))))
                    by_chance += float(binom.sf(needed - 1, len(windows), rate))
            overlap.append(round(max(shares), 4) if shares else None)
        return Marks(tuple(overlap), by_chance, limit)


def training_text(data: Path | None) -> TrainingText | None:
    """The indexes of a data set; None, with a log line, if a part of it has none.

    Raises:
        UserError: an index or the metadata is broken.
    """
    metadata = data and read_data_metadata(data)
    if not data or not metadata:
        return None
    # Of a blend, every part needs an index: what is missing could contain any example.
    indexes, prompts = [], []
    for folder in [data / part.folder for part in metadata.blend] or [data]:
        part = read_data_metadata(folder) if metadata.blend else metadata
        if part is not None and part.ngrams is not None:
            indexes.append(TrainingIndex.read(folder, part.ngrams))
        elif part is not None and part.prompts is not None:
            prompts.append(PromptIndex.read(folder))
        else:
            log.info("%s has no index: examples are not checked for contamination", folder)
            return None
    return TrainingText(indexes, prompts)


def statement(name: str, summary: Mapping[str, Any]) -> str | None:
    """A sentence if a set is not held out; None if it is."""
    if not summary["contaminated"]:
        return None
    return (
        f"{name}: not held out: the training text contains {summary['contaminated']:,} of its "
        f"{summary['units']:,} units ({summary['by_chance']:.2g} would be marked by chance)"
    )
