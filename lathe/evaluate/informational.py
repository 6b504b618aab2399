"""Figures next to a verdict, for information only: flips, agreement and divergence.

Two models of the same accuracy may differ in many answers. Dutta et al., Accuracy is not all you
need (2024), find that the share of flipped answers and the divergence of next-token distributions
show the effects of compression better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lathe.evaluate.comparison import Accuracy, Units
from lathe.evaluate.intervals import Interval, of_units, share_interval
from lathe.evaluate.paired_evaluations import Pair, Pairing


@dataclass(frozen=True)
class InformationalMetric:
    """A figure with its confidence interval.

    Attributes:
        measure: its name.
        n: number of units, which `unit` names.
        lost, gained: for flips, examples that only the baseline, or only the candidate, gets right.
    """

    measure: str
    value: float
    low: float
    high: float
    n: int
    unit: str
    method: str
    lost: int | None = None
    gained: int | None = None

    def text(self) -> tuple[str, str]:
        """The figure and its interval, as text."""
        shape = "{:.5f} nats" if self.measure.startswith("KL") else "{:.2%}"
        value, low, high = (shape.format(x) for x in (self.value, self.low, self.high))
        return value, f"{low} to {high}"

    def units(self) -> str:
        """The number of units it was measured on, as text."""
        flips = f", {self.lost} lost, {self.gained} gained" if self.lost is not None else ""
        return f"{self.n:,} {self.unit}{flips}"


def informational_metrics(pairing: Pairing, confidence: float) -> Iterator[InformationalMetric]:
    """Yield the flips of every accuracy; agreement and divergence where the candidate was evaluated
    with the baseline as its reference."""
    for pair in pairing.pairs:
        if isinstance(pair.measure, Accuracy):
            rows = (*pair.before.rows, *pair.after.rows)
            if all(pair.measure.column in row for row in rows):  # earlier versions wrote fewer
                yield _flips(pair, pair.measure, confidence)
        elif (
            "agreement" in pair.after.figures
            and len(pair.after.rows) > 1
            and pairing.after["digests"].get("reference") == pairing.baseline
        ):
            yield from _divergence(pair.after, confidence)


def _flips(pair: Pair, measure: Accuracy, confidence: float) -> InformationalMetric:
    theirs, ours = measure.right(pair.before), measure.right(pair.after)
    lost, gained = int((theirs & ~ours).sum()), int((~theirs & ours).sum())
    interval = share_interval(lost + gained, len(theirs), confidence)
    what, method = f"flips of {pair.name}", "Wilson's score interval"
    return _informational(what, interval, len(theirs), "examples", method, lost=lost, gained=gained)


def _divergence(units: Units, confidence: float) -> Iterator[InformationalMetric]:
    tokens = units.column("tokens")
    for what, column in (
        ("top-1 agreement", "agreed"),
        ("KL divergence from the baseline", "divergence"),
    ):
        interval = of_units(units.column(column), tokens).interval(confidence)
        method = "linearized ratio over blocks, Student's t"
        yield _informational(what, interval, len(tokens), "blocks", method)


def _informational(
    measure: str, interval: Interval, n: int, unit: str, method: str, **flips: int
) -> InformationalMetric:
    return InformationalMetric(
        measure, interval.estimate, interval.low, interval.high, n, unit, method, **flips
    )
