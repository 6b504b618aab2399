"""The figures of a task that models are compared by, and how two models differ in one.

Shapes: n units (examples, or blocks of a text) that both models were measured on.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.config.settings import GateSettings
from lathe.errors import UserError
from lathe.evaluate.paired import accuracy_difference, loss_difference, mcnemar

Verdict = Literal["pass", "inconclusive", "fail"]
LARGEST_EXPONENT = 700.0  # exp of more is no float


@dataclass(frozen=True)
class Units:
    """What one model scored on a task.

    Attributes:
        folder: the evaluation.
        figures: the task's in `metrics.json`.
        columns: by name (n,), a number a unit.
    """

    folder: Path
    figures: Mapping[str, Any]
    columns: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Check:
    """One measure of both models.

    Attributes:
        n: examples, or blocks of the text.
        change: accuracy: candidate less baseline; perplexity: relative to the baseline.
        low, high: its confidence interval.
        limit: the change that is still allowed, negative for accuracy.
        lost, gained: examples that only the baseline, or only the candidate, has right.
        p_value: McNemar's exact test of no difference at all.
        method: of the interval; see `lathe.evaluate.paired`.
    """

    measure: str
    verdict: Verdict
    baseline: float
    candidate: float
    change: float
    low: float
    high: float
    limit: float
    n: int
    method: str
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measure(ABC):
    """A figure of a task, with its standard error where the task has one.

    Attributes:
        key: its name among the task's figures; the error is `KEY_stderr`.
        title: as tables and pictures call it.
        axis: what the axis of a picture says.
        margin: how much worse the gate lets it become; None: the gate does not look at it.
        factor: figure times this is what the axis shows.
        has_ratio: whether it says something how many times another model's it is.
        fixed: columns that are the same for every model measured on the same file.
    """

    key: str
    title: str
    axis: str
    margin: Callable[[GateSettings], float] | None = None

    higher_is_better: ClassVar[bool]
    factor: ClassVar[float]
    has_ratio: ClassVar[bool]
    fixed: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the units that it is computed from."""

    @abstractmethod
    def show(self, value: float) -> str:
        """A figure, or its standard error, in a table."""

    @abstractmethod
    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        """The check `name` of a candidate, `after`, against its baseline."""


@dataclass(frozen=True, kw_only=True)
class Accuracy(Measure):
    """The share of examples that are right.

    Attributes:
        column: which says of every example whether it is.
    """

    column: str

    higher_is_better: ClassVar[bool] = True
    factor: ClassVar[float] = 100.0
    has_ratio: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def show(self, value: float) -> str:
        return f"{100 * value:.1f} %"

    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        theirs, ours = (units.columns[self.column].astype(bool) for units in (before, after))
        lost, gained = int((theirs & ~ours).sum()), int((~theirs & ours).sum())
        difference = accuracy_difference(lost, gained, len(theirs), confidence)
        return Check(
            measure=name,
            verdict=judge(-difference.high, -difference.low, margin),
            baseline=float(theirs.mean()),
            candidate=float(ours.mean()),
            change=difference.estimate,
            low=difference.low,
            high=difference.high,
            limit=-margin,
            n=len(theirs),
            method="Tango's score interval",
            lost=lost,
            gained=gained,
            p_value=mcnemar(lost, gained),
        )


@dataclass(frozen=True, kw_only=True)
class Perplexity(Measure):
    """exp of the mean loss a token, over blocks: columns `loss` (summed nats) and `tokens`."""

    higher_is_better: ClassVar[bool] = False
    factor: ClassVar[float] = 1.0
    has_ratio: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("tokens",)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("loss", "tokens")

    def show(self, value: float) -> str:
        return f"{value:.2f}"

    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        tokens = before.columns["tokens"]
        if len(tokens) < 2:
            raise UserError(f"{before.folder}: one block of text", "evaluate on a longer text")
        theirs, ours = before.columns["loss"], after.columns["loss"]
        difference = loss_difference(theirs, ours, tokens, confidence)
        change, low, high = (
            math.expm1(min(x, LARGEST_EXPONENT))
            for x in (difference.estimate, difference.low, difference.high)
        )
        return Check(
            measure=name,
            verdict=judge(low, high, margin),
            baseline=before.figures[self.key],
            candidate=after.figures[self.key],
            change=change,
            low=low,
            high=high,
            limit=margin,
            n=len(tokens),
            method="linearized ratio over blocks, Student's t",
        )


def judge(best: float, worst: float, allowed: float) -> Verdict:
    """The verdict on a loss that lies between `best` and `worst`."""
    if worst <= allowed:
        return "pass"
    return "fail" if best > allowed else "inconclusive"
