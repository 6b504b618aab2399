"""Measures that are means of a score or of a cost per example, as of lm-evaluation-harness."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.errors import UserError
from lathe.evaluate.measures import Check, Measure, Units, by_documents, judge
from lathe.evaluate.paired import needed_units, of_documents, of_units


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
        ones = np.ones(len(theirs))
        if documents is None:
            totals, method, test = of_units(ours - theirs, ones), "paired Student's t", "paired t"
        else:
            totals = of_documents(ours - theirs, ones, documents)
            method, test = by_documents(totals), "t-test by document"
        difference = totals.interval(confidence)
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
            method=method,
            unit="examples",
            p_value=totals.p_value(),
            detectable=detectable if math.isfinite(detectable) else None,
            needed=needed,
            test=test,
            scale="own",
        )


@dataclass(frozen=True, kw_only=True)
class MeanCost(MeanScore):
    """The mean of a cost, of which less is better."""

    higher_is_better: ClassVar[bool] = False
