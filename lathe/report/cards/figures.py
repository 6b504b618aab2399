"""The figures of an evaluation, with confidence intervals."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from scipy.stats import binomtest  # type: ignore[import-untyped]

from lathe.evaluate.comparison import Accuracy, Measure
from lathe.evaluate.evaluation_folder import measured

CONFIDENCE = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A figure of an evaluation.

    Attributes:
        label: its name in tables.
        interval: the interval at `CONFIDENCE`; None if the standard error is unknown.
        n: number of units; `unit` names them.
        source, sha256: the evaluated file.
    """

    label: str
    measure: Measure
    value: float
    stderr: float | None
    interval: Interval | None
    n: int
    unit: str
    source: str
    sha256: str

    @property
    def kind(self) -> str:
        """`accuracy` or `perplexity`, the names of Hugging Face's metrics."""
        return "accuracy" if isinstance(self.measure, Accuracy) else "perplexity"

    @property
    def shown(self) -> str:
        """The figure as text for a table."""
        return self.measure.show(self.value)

    @property
    def shown_interval(self) -> str:
        """The interval as text for a table."""
        if self.interval is None:
            return "not known"
        low, high = (self.measure.show(end) for end in self.interval)
        return f"{low} to {high}"


def read_figures(metrics: Mapping[str, Any], folder: Path) -> Iterator[Figure]:
    """Every measure in `metrics.json`, as a figure.

    Args:
        folder: the evaluation folder, for messages.

    Raises:
        UserError: an unknown task, or one without its figures.
    """
    for result in measured(metrics, folder):
        entry = metrics["tasks"].get(result.name, {})
        n = int(result.figures[result.task.unit])
        for measure, value, stderr in result.scores():
            yield Figure(
                label=result.label(measure),
                measure=measure,
                value=value,
                stderr=stderr,
                interval=interval(measure, value, stderr, n),
                n=n,
                unit=result.task.unit,
                source=entry.get("source") or metrics["sources"].get(result.name) or result.name,
                sha256=result.digest or "",
            )


def interval(measure: Measure, value: float, stderr: float | None, n: int) -> Interval | None:
    """The confidence interval of a figure: for an accuracy Wilson's score interval (Wilson 1927),
    for a perplexity the normal interval of its logarithm, whose standard error is `stderr / value`.

    Args:
        n: number of examples of an accuracy.
    """
    if isinstance(measure, Accuracy):
        bounds = binomtest(round(value * n), n).proportion_ci(CONFIDENCE, method="wilson")
        return float(bounds.low), float(bounds.high)
    if stderr is None:
        return None
    ratio = math.exp(NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * stderr / value)
    return value / ratio, value * ratio
