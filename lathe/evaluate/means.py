"""Measures that are means of a score or of a cost per example, as of lm-evaluation-harness."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.errors import UserError
from lathe.evaluate.measures import Check, Measure, Units, by_documents, judge
from lathe.evaluate.paired import needed_units, ratio_interval, summed, t_test


@dataclass(frozen=True, kw_only=True)
class MeanScore(Measure):
    """The mean of a score, of which more is better, in its own unit.

    Attributes:
        column: the column with the score of each example.
    """

    column: str

    higher_is_better: ClassVar[bool] = True
    factor: ClassVar[float] = 1.0
    has_ratio: ClassVar[bool] = True

    def show(self, value: float) -> str:
        return f"{value:.4g}"

    def overall(self, units: Units) -> float:
        return float(units.column(self.column).mean())

    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        theirs, ours = (units.column(self.column) for units in (before, after))
        if len(theirs) < 2:
            raise UserError(f"{before.path}: fewer than two examples", "evaluate on more data")
        documents = before.documents()
        units = np.arange(len(theirs)) if documents is None else documents
        sums, counts = summed(ours - theirs, units), summed(np.ones(len(ours)), units)
        difference = ratio_interval(sums, counts, confidence)
        limit = -margin if self.higher_is_better else margin
        ends = (difference.low, difference.high)
        best, worst = (-ends[1], -ends[0]) if self.higher_is_better else ends
        verdict, needed = judge(best, worst, margin), None
        if verdict == "inconclusive":
            needed = needed_units(len(theirs), difference.of_more, limit)
        detectable = difference.detectable(confidence)
        return Check(
            measure=name,
            verdict=verdict,
            baseline=float(theirs.mean()),
            candidate=float(ours.mean()),
            change=difference.estimate,
            low=difference.low,
            high=difference.high,
            limit=limit,
            n=len(theirs),
            method="paired Student's t" if documents is None else by_documents(documents),
            unit="examples",
            p_value=t_test(sums, counts),
            detectable=detectable if math.isfinite(detectable) else None,
            needed=needed,
            test="paired t" if documents is None else "t-test by document",
            scale="own",
        )


@dataclass(frozen=True, kw_only=True)
class MeanCost(MeanScore):
    """The mean of a cost, of which less is better."""

    higher_is_better: ClassVar[bool] = False
