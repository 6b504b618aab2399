"""Measures: the metrics by which models are compared, the comparison of two models, and its result,
a check, in words.

Shapes: n units (examples, or blocks of a text) on which both models were measured.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.evaluate.intervals import (
    Interval,
    Totals,
    accuracy_difference,
    cluster_totals,
    mcnemar,
    needed_units,
    unit_totals,
)
from lathe_base.config.settings import GateSettings
from lathe_base.errors import Code, UserError

Verdict = Literal["pass", "inconclusive", "fail"]
PAST = {"pass": "passed", "inconclusive": "not proven", "fail": "failed"}
"""A check's verdict in the past tense."""

MAX_EXPONENT = 700.0  # exp of more overflows

AGAIN = "_again"
"""Suffix of a column with the results of a second run of the same model."""

MIN_DOCUMENTS = 5
"""Minimum number of documents for a cluster-robust standard error."""
MAX_STRETCHES = 20
"""Maximum number of stretches that fewer documents are divided into: with more, short ones would
depend on each other."""


@dataclass(frozen=True)
class Units:
    """One model's results on a task.

    Attributes:
        path: the JSONL file.
        figures: the task's figures in `metrics.json`.
        rows: the lines of the file, one per unit.
        document: the key of a row that names the unit's document; rows may lack it.
        is_stream: whether the units are consecutive parts of one text.
        vocab_size: of the model's tokenizer; None if it was not recorded.
    """

    path: Path
    figures: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    document: str | None = "document"
    is_stream: bool = False
    vocab_size: int | None = None

    def column(self, name: str) -> NDArray[np.float64]:
        """One number per unit, (n,).

        Raises:
            UserError: a value is missing, not a number, or not finite.
        """
        hint = "evaluate the model again"
        try:
            column = np.array([float(row[name]) for row in self.rows])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self.path}: broken", hint, Code.MALFORMED) from None
        if not np.isfinite(column).all():
            raise UserError(f"{self.path}: holds NaN or infinity", hint, Code.NOT_FINITE)
        return column

    def noise_floor(self, name: str) -> int | None:
        """Number of units in which a second run of the same model differs in a column; None if
        there was none."""
        again = [row.get(f"{name}{AGAIN}") for row in self.rows]
        if None in again:
            return None
        return sum(bool(row[name] != x) for row, x in zip(self.rows, again, strict=True))

    def clusters(self) -> NDArray[np.int64] | None:
        """The index of each unit's cluster, (n,): its document or, if there are fewer than
        MIN_DOCUMENTS, a stretch of consecutive units of its document (batch means: Schmeiser, Batch
        size effects in the analysis of simulation output, Operations Research 30, 1982). Blocks of
        a text without document names count as one document. None if the document is unknown, if
        every unit has its own, or with too few units for stretches."""
        ids, n = self._document_ids()
        if n == 0 and self.is_stream:
            ids, n = np.zeros(len(self.rows), np.int64), 1
        if not 0 < n < len(ids):
            return None
        if n >= MIN_DOCUMENTS:
            return ids

        # Too few documents to estimate a variance between them: cut each into stretches, long
        # enough that what correlates neighbours mostly stays within one.
        size = max(2, math.ceil(len(ids) / MAX_STRETCHES))
        stretches: dict[tuple[int, int], int] = {}
        seen, clusters = Counter[int](), []
        for document in ids.tolist():
            stretch = document, seen[document] // size
            clusters.append(stretches.setdefault(stretch, len(stretches)))
            seen[document] += 1
        return np.array(clusters, np.int64) if len(stretches) >= MIN_DOCUMENTS else None

    def totals(self, values: NDArray[np.float64], counts: NDArray[np.float64]) -> Totals:
        """Totals, for a mean and its interval, of the clusters, or else of the units.

        Args:
            values, counts: (n,) of each unit.
        """
        clusters = self.clusters()
        if clusters is None:
            return unit_totals(values, counts)
        return cluster_totals(values, counts, clusters)

    def n_documents(self) -> int | None:
        """Number of documents; None if it is unknown, or if every unit has its own document."""
        _, n = self._document_ids()
        return n if 0 < n < len(self.rows) else None

    def _document_ids(self) -> tuple[NDArray[np.int64], int]:
        """The index of each unit's document, (n,), and the number of documents; 0 if unknown."""
        names = [row.get(self.document) if self.document else None for row in self.rows]
        if any(name is None for name in names):
            return np.zeros(0, np.int64), 0
        numbers: dict[str, int] = {}
        ids = np.array([numbers.setdefault(str(name), len(numbers)) for name in names], np.int64)
        return ids, len(numbers)


@dataclass(frozen=True)
class Check:
    """One measure of both models.

    Attributes:
        change: candidate minus baseline for an accuracy, relative to the baseline for a perplexity.
        low, high: confidence interval of the change.
        limit: the largest allowed change, negative for accuracy.
        n: number of examples, words or blocks of the text; `unit` says which.
        method: of the interval; see `lathe.evaluate.intervals`.
        lost, gained: examples that only the baseline, or only the candidate, gets right.
        p_value: that of the `test` that the models do not differ.
        test: McNemar's exact test for accuracies, or the paired t-test.
        scale: unit of the change: points for an accuracy, relative for a perplexity, its own unit
            for another mean.
        detectable: the minimum detectable effect at 80 % power.
        documents: number of documents that the units are from; None if unknown, or one each.
        chance: what a model that has learned nothing gets: no last word right, one choice in four,
            the perplexity of a uniform guess among all tokens; None if unknown.
        noise_floor: number of examples on which the baseline disagrees with itself when it is run
            again, None if that was not measured. A drop of no more than that proves no loss, so
            such a check does not fail.
        needed: number of units that would decide an inconclusive check, if the change stays the
            same.
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
    unit: str
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None
    detectable: float | None = None
    needed: int | None = None
    documents: int | None = None
    chance: float | None = None
    noise_floor: int | None = None
    test: str = "McNemar"
    scale: Literal["points", "relative", "own"] = "relative"

    @property
    def is_meaningless(self) -> bool:
        """Whether a model that has learned nothing would pass: its accuracy would be within the
        margin, or the baseline's perplexity is no better than its own."""
        if self.chance is None:
            return False
        if self.scale == "relative":
            return self.chance <= self.baseline
        return self.chance >= self.baseline + self.limit

    @property
    def is_noise(self) -> bool:
        """Whether the candidate's drop is within the noise floor."""
        return self.noise_floor is not None and 0 < self.net_loss <= self.noise_floor

    @property
    def net_loss(self) -> int:
        """Examples lost minus those gained."""
        return (self.lost or 0) - (self.gained or 0)

    def formatted(self) -> dict[str, str]:
        """The figures as text; accuracies change by percentage points."""
        value, change, factor = {
            "points": ("{:.2%}", "{:+.2f} points", 100),
            "relative": ("{:.2f}", "{:+.3g}%", 100),
            "own": ("{:.4g}", "{:+.3g}", 1),
        }[self.scale]
        shown = {name: value.format(getattr(self, name)) for name in ("baseline", "candidate")}
        for name in ("change", "low", "high", "limit"):
            shown[name] = change.format(factor * getattr(self, name))
        plain = change.replace("+", "").format(factor * (self.detectable or 0.0))
        shown["detectable"] = f"a change of {plain}"
        return shown

    def formatted_units(self) -> str:
        """The number of units, with flips and p-value, as text."""
        text = f"{self.n:,} {self.unit}"
        if self.documents is not None:
            text += f" of {self.documents:,} document{'s' if self.documents > 1 else ''}"
            if self.documents < MIN_DOCUMENTS:
                text += ", too few to measure how documents differ"
        if self.p_value is not None:
            flips = f"{self.lost} lost, {self.gained} gained, " if self.lost is not None else ""
            text += f", {flips}{self.test} p = {self.p_value:.2g}"
        if self.is_meaningless:
            text += " (meaningless: even a model that has learned nothing would pass)"
        return text

    def decisive_units(self) -> str:
        """The number of units that would decide an inconclusive check, to two digits."""
        return f"about {float(f'{self.needed:.2g}'):,.0f} {self.unit}" if self.needed else ""

    def sentence(self, confidence: float) -> str:
        """The result as a sentence, for the reasons of a verdict."""
        shown = self.formatted()
        text = (
            f"{PAST[self.verdict]}: {self.measure} {shown['baseline']} -> {shown['candidate']}: "
            f"a change of {shown['change']}, {100 * confidence:.6g}% interval {shown['low']} to "
            f"{shown['high']}, {shown['limit']} allowed; {self.formatted_units()}"
        )
        if self.needed:
            text += f"; {self.decisive_units()} would decide it if the change stays the same"
        if self.noise_floor is not None:
            text += (
                f"; run again, the baseline disagrees with itself on {self.noise_floor:,} of "
                f"{self.n:,}"
            )
        if self.is_noise:
            text += f", so a net loss of {self.net_loss:,} is no evidence of a worse model"
        return text


def outcome(verdict: str, passed: bool) -> str:
    """A verdict in words. NOT PROVEN is in capitals, so that it is not mistaken for a pass."""
    if verdict != "inconclusive":
        return PAST.get(verdict, verdict)
    return "NOT PROVEN, passed by the recipe" if passed else "NOT PROVEN"


@dataclass(frozen=True, kw_only=True)
class Measure(ABC):
    """A metric of a task, with its standard error if the task has one.

    Attributes:
        key: its name among the task's figures; the standard error is `KEY_stderr`.
        title: its name in tables and charts.
        metric: its name among a run's metrics; default: the key.
        axis: axis label of its chart; None: it has no chart.
        margin: how much worse it may become; None: the gate does not check it.
        factor: factor from the figure's unit to the axis's.
        has_ratio: whether its ratio between two models is meaningful.
    """

    key: str
    title: str
    metric: str = ""
    axis: str | None = None
    margin: Callable[[GateSettings], float | None] = lambda gate: None

    higher_is_better: ClassVar[bool]
    factor: ClassVar[float]
    has_ratio: ClassVar[bool]

    @abstractmethod
    def show(self, value: float) -> str:
        """A figure, or its standard error, as text for a table."""

    @abstractmethod
    def overall(self, units: Units) -> float:
        """The figure over all units."""

    def chance(self, units: Units) -> float | None:
        """The figure of a model that has learned nothing; None if unknown."""
        return None

    @abstractmethod
    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        """Compare a candidate, `after`, with its baseline, `before`, as the check `name`.

        Raises:
            UserError: too few units for an interval, or units without the value to compare.
        """

    def _check(
        self,
        name: str,
        before: Units,
        after: Units,
        margin: float,
        confidence: float,
        interval: Callable[[float], Interval],
        shown: Callable[[float], float] = float,
        unshown: Callable[[float], float] = float,
        **details: Any,
    ) -> Check:
        """The check of a difference.

        Args:
            interval: returns that of the difference, with `factor` times as many units.
            shown: converts a difference to the reported change, to which the margin applies;
                increasing.
            unshown: its inverse.
        """
        n, difference = len(before.rows), interval(1.0)
        low, high = shown(difference.low), shown(difference.high)

        # Losses of quality are positive: an accuracy's changes have the other sign.
        best, worst = (-high, -low) if self.higher_is_better else (low, high)
        verdict = judge(best, worst, margin)
        limit = -margin if self.higher_is_better else margin
        # The interval shrinks in the unit of the difference, where the limit has to be too.
        needed = needed_units(n, interval, unshown(limit)) if verdict == "inconclusive" else None
        detectable = shown(difference.detectable(confidence))
        return Check(
            measure=name,
            verdict=verdict,
            baseline=self.overall(before),
            candidate=self.overall(after),
            change=shown(difference.estimate),
            low=low,
            high=high,
            limit=limit,
            n=n,
            # Half of an unbounded interval is infinite, which JSON cannot say.
            detectable=detectable if math.isfinite(detectable) else None,
            needed=needed,
            documents=before.n_documents(),
            chance=self.chance(before),
            **details,
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy(Measure):
    """The share of examples answered correctly.

    Attributes:
        column: the column with whether an example is correct.
        guesses: returns the share that random answers get right.
    """

    column: str
    guesses: Callable[[Units], float] = lambda units: 0.0

    higher_is_better: ClassVar[bool] = True
    factor: ClassVar[float] = 100.0
    has_ratio: ClassVar[bool] = False

    def show(self, value: float) -> str:
        return f"{100 * value:.1f} %"

    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        # Only the examples on which the models differ count: an example's difficulty cancels out.
        theirs, ours = (self.right(units) for units in (before, after))
        lost, gained, n = int((theirs & ~ours).sum()), int((~theirs & ours).sum()), len(theirs)
        clusters = before.clusters()
        totals = None
        if clusters is not None:
            totals = cluster_totals(ours.astype(np.float64) - theirs, np.ones(n), clusters)

        # Tango's interval is right with few flips, but takes examples for independent. The
        # cluster-robust one does not, but has no width where no answer flips. The wider is safe.
        def interval(factor: float) -> Interval:
            """The interval with `factor` times as many examples."""
            score = accuracy_difference(factor * lost, factor * gained, factor * n, confidence)
            if totals is None:
                return score
            robust = totals.interval(confidence).scaled_to(factor)
            return Interval(
                score.estimate, min(score.low, robust.low), max(score.high, robust.high)
            )

        method, test, p_value = "Tango's score interval", "McNemar", mcnemar(lost, gained)
        if totals is not None:
            robust, test = _by_clusters(before, totals)
            method, p_value = f"the wider of {method} and {robust}", totals.p_value()
        check = self._check(
            *(name, before, after, margin, confidence),
            interval=interval,
            method=method,
            unit="examples",
            lost=lost,
            gained=gained,
            p_value=p_value,
            test=test,
            scale="points",
            noise_floor=before.noise_floor(self.column),
        )
        # The same model loses as many when it is run again: that proves nothing about another
        # model.
        if check.verdict == "fail" and check.is_noise:
            return replace(check, verdict="inconclusive")
        return check

    def overall(self, units: Units) -> float:
        return float(self.right(units).mean())

    def chance(self, units: Units) -> float:
        return self.guesses(units)

    def right(self, units: Units) -> NDArray[np.bool_]:
        """Whether each example is correct, (n,)."""
        return units.column(self.column).astype(bool)


@dataclass(frozen=True, kw_only=True)
class Perplexity(Measure):
    """exp of the mean loss, over blocks of a text or over words.

    Attributes:
        loss: returns the nats of every unit, (n,).
        tokens: returns the tokens, or words, of every unit, (n,); the same for every model.
        predictions: returns the predicted tokens of every unit, (n,); default: `tokens`.
        method: of the interval; see `lathe.evaluate.intervals.Totals`.
        unit: what the units are.
        whole_above: figures from this value on are shown without decimals.
    """

    loss: Callable[[Units], NDArray[np.float64]]
    tokens: Callable[[Units], NDArray[np.float64]]
    predictions: Callable[[Units], NDArray[np.float64]] | None = None
    method: str
    unit: str
    whole_above: float = math.inf

    higher_is_better: ClassVar[bool] = False
    factor: ClassVar[float] = 1.0
    has_ratio: ClassVar[bool] = True

    def show(self, value: float) -> str:
        return f"{value:.0f}" if value >= self.whole_above else f"{value:.2f}"

    def compare(
        self, name: str, before: Units, after: Units, margin: float, confidence: float
    ) -> Check:
        tokens = self.tokens(before)
        if len(tokens) < 2:
            raise UserError(
                f"{before.path}: fewer than two {self.unit}",
                "evaluate on more data",
                Code.TOO_LITTLE_DATA,
            )
        if (tokens != self.tokens(after)).any():
            raise UserError(
                f"{before.path} and {after.path} have different {self.unit}",
                "evaluate both models on the same data with the same recipe",
                Code.MISMATCH,
            )
        # Losses are compared, whose difference has a symmetric interval; `shown` makes it the
        # relative change of the perplexity, exp(difference) - 1.
        totals = before.totals(self.loss(after) - self.loss(before), tokens)
        method, _ = _by_clusters(before, totals, self.method)
        return self._check(
            *(name, before, after, margin, confidence),
            interval=totals.interval(confidence).scaled_to,
            shown=lambda loss: math.expm1(min(loss, MAX_EXPONENT)),
            unshown=math.log1p,
            method=method,
            unit=self.unit,
        )

    def overall(self, units: Units) -> float:
        loss = float(self.loss(units).sum() / self.tokens(units).sum())
        return math.exp(min(loss, MAX_EXPONENT))

    def chance(self, units: Units) -> float | None:
        if units.vocab_size is None:
            return None
        # A uniform guess costs log V for each predicted token, of which a word may have several.
        predictions = (self.predictions or self.tokens)(units).sum() / self.tokens(units).sum()
        return math.exp(min(math.log(units.vocab_size) * predictions, MAX_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class MeanScore(Measure):
    """The mean of a score, in its own unit; higher is better.

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
            raise UserError(
                f"{before.path}: fewer than two examples",
                "evaluate on more data",
                Code.TOO_LITTLE_DATA,
            )
        totals = before.totals(ours - theirs, np.ones(len(theirs)))
        method, test = _by_clusters(before, totals, "paired Student's t", "paired t")
        return self._check(
            *(name, before, after, margin, confidence),
            interval=totals.interval(confidence).scaled_to,
            method=method,
            unit="examples",
            p_value=totals.p_value(),
            test=test,
            scale="own",
        )


@dataclass(frozen=True, kw_only=True)
class MeanCost(MeanScore):
    """The mean of a cost; lower is better."""

    higher_is_better: ClassVar[bool] = False


def _by_clusters(units: Units, totals: Totals, method: str = "", test: str = "") -> tuple[str, str]:
    """The interval and the test of totals in words: those of clusters, which are fewer than the
    units, or else `method` and `test`."""
    n = len(totals.sums)
    if n == len(units.rows):
        return method, test
    if n == units.n_documents():
        return f"the cluster-robust interval of {n} documents", "t-test by document"
    whole = "the text" if units.n_documents() is None else "documents"
    return f"the cluster-robust interval of {n} stretches of {whole}", "t-test by stretch"


def judge(best: float, worst: float, allowed: float) -> Verdict:
    """The verdict on a loss of quality that lies between `best` and `worst`."""
    if worst <= allowed:
        return "pass"
    return "fail" if best > allowed else "inconclusive"


@dataclass(frozen=True)
class Pair:
    """One measure of two models; `name` is its name in the verdict."""

    name: str
    measure: Measure
    before: Units
    after: Units


@dataclass(frozen=True)
class Pairing:
    """Two models measured on the same units.

    Attributes:
        before, after: description of each in the verdict's file: at least folder and digests.
        baseline: digest of the baseline, by which repeated comparisons are recognized; empty if it
            was not recorded.
        candidate: digest of the candidate and its evaluation data.
        notes: what could not be compared, and why.
    """

    pairs: tuple[Pair, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    baseline: str
    candidate: str
    notes: tuple[str, ...] = ()
