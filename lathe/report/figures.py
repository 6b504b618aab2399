"""The charts of a report, each an SVG document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lathe_base.pages.style import Theme, draw


@dataclass(frozen=True)
class ComparedFigure:
    """One quantity for every candidate.

    Attributes:
        values: one per candidate; None if it was not measured.
        intervals: (low, high) of each value.
        labels: text next to each value.
        from_zero: bars from zero (a size) instead of points on a zoomed axis (a score).
    """

    title: str
    unit: str
    names: Sequence[str]
    values: Sequence[float | None]
    labels: Sequence[str]
    intervals: Sequence[tuple[float, float] | None] | None = None
    from_zero: bool = True


def loss_curve(records: Sequence[Mapping[str, Any]], series: int, theme: Theme) -> str:
    """Training loss per step, its moving average, and the validation losses.

    Args:
        records: lines of `train.jsonl`.
        series: index of the candidate, which sets the color.
    """
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r], dtype=float)
    held_out = np.array([(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r])

    def paint(axes: Axes, theme: Theme) -> None:
        color = theme.color(series)
        if len(train):
            steps, losses = train.T
            axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _smooth(losses), color=color, linewidth=1.8, label="training")
        if len(held_out):
            steps, losses = held_out.T
            axes.plot(
                steps,
                losses,
                color=theme.ink,
                linewidth=1.2,
                linestyle=(0, (4, 2)),
                marker="o",
                markersize=4.5,
                label="validation",
                zorder=3,
            )
            axes.annotate(
                f"{losses[-1]:.3f}",
                (steps[-1], losses[-1]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="right",
                weight="bold",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.02, y=0.12)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    return draw(2.8, theme, paint)


def comparison(measure: ComparedFigure, theme: Theme) -> str:
    """One quantity with one row per candidate: bars, or points with a 95 % interval."""
    rows = [i for i, value in enumerate(measure.values) if value is not None]
    values = np.array([measure.values[i] for i in rows], dtype=float)
    known = measure.intervals or [None] * len(measure.values)
    ends = np.array([known[i] or (measure.values[i], measure.values[i]) for i in rows], dtype=float)

    def paint(axes: Axes, theme: Theme) -> None:
        for row, i in enumerate(rows):
            color = theme.color(i)
            if measure.from_zero:
                axes.barh(row, values[row], 0.56, color=color)
            else:
                axes.errorbar(
                    values[row], row, fmt="o", color=color,
                    xerr=np.abs(ends[row] - values[row])[:, None] if known[i] else None,
                    markersize=8, elinewidth=2.2, capsize=4, capthick=2.2,
                )  # fmt: skip
        for row, i in enumerate(rows):
            axes.annotate(
                measure.labels[i], (ends[row, 1], row), xytext=(7, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [measure.names[i] for i in rows])
        axes.tick_params(axis="y", labelcolor=theme.ink)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(measure.unit)
        low, high = ends.min(), ends.max()
        # Room on the right for the labels.
        span = high if measure.from_zero else max(high - low, 0.02 * abs(high), 0.5)
        start = 0.0 if measure.from_zero else low - 0.15 * span
        axes.set_xlim(start, high + (0.5 if measure.from_zero else 0.6) * span)
        axes.locator_params(axis="x", nbins=6)
        if measure.unit.startswith("%"):
            axes.set_xticks([tick for tick in axes.get_xticks() if start <= tick <= 100])

    return draw(0.75 + 0.42 * len(rows), theme, paint)


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centered moving average over a tenth of the run, without lag. The window shrinks at the
    start, where the loss is steep, and is one-sided at the end."""
    reach, n = len(values) // 20, len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(n)
    low = at - np.minimum(reach, at)
    high = np.minimum(at + np.minimum(reach, at), n - 1) + 1
    return np.asarray((sums[high] - sums[low]) / (high - low))
