"""Render a sensitivity analysis as a page, or as a section of a run's report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lathe_base.config.settings.types import FORMATS
from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw

MAX_LINEARS = 24
UNITS = {
    "loss": "nats per token",
    "kl": "nats per token",
    "accuracy": "share of next tokens",
}
FRACTIONS = ((1.0, ""), (1e3, "thousandths of "), (1e6, "millionths of "))
TITLES: dict[str, str] = {"": "quantized"} | {name: x.title for name, x in FORMATS.items()}
HATCHES = "", "..", "xx", "++"
Linears = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Achieved:
    """The actual cost of quantization with the analysis's choice.

    Attributes:
        name, parent: names of the model and of its float parent.
        before, after: perplexity of parent and model on the held-out text.
    """

    name: str
    parent: str
    before: float
    after: float

    @property
    def cost(self) -> float:
        """Increase in loss, nats per token."""
        return math.log(self.after / self.before)


@dataclass(frozen=True)
class Section:
    """The template's view of `sensitivity.json`.

    Attributes:
        wider: the linears without the narrowest format, by format.
    """

    analysis: Mapping[str, Any]
    unit: str
    baseline: str
    wider: Mapping[str, Sequence[str]]
    ranking: Picture
    weights: Picture
    inputs: Picture
    achieved: Achieved | None = None


def section(analysis: Mapping[str, Any], achieved: Achieved | None = None) -> Section:
    """The pictures and figures of an analysis, for the templates."""
    linears, unit = analysis["linears"], UNITS[analysis["metric"]]
    formats = analysis.get("formats", {})  # earlier versions knew no choice between several
    measured = [*linears[0].get("scores", {})]
    chosen = {x["name"]: formats.get(x["name"], "") if measured else "" for x in linears}
    chosen |= dict.fromkeys(analysis["skip"], "float")
    worst = ", ".join(f"{linear['name']} {linear['score']:.2g}" for linear in linears[:3])
    title = "Cost of quantizing one linear"
    boxes = {
        part: picture(
            f"{part.capitalize()}: quartiles and range",
            f"Box plots of the {part} of the linears, the most sensitive first",
            partial(box_plots, linears, part),
        )
        for part in ("weights", "inputs")
    }
    return Section(
        analysis=analysis,
        unit=unit,
        baseline=("quantized " if analysis["mode"] == "qat" else "float ") + analysis["metric"],
        wider={
            TITLES[fmt]: [name for name, chosen_format in chosen.items() if chosen_format == fmt]
            for fmt in measured[1:]
        },
        ranking=picture(
            title, f"{title}, worst first: {worst}",
            partial(ranking_chart, linears, chosen, unit),
        ),
        **boxes,
        achieved=achieved,
    )  # fmt: skip


def sensitivity_page(analysis: Mapping[str, Any]) -> str:
    """The HTML page of a `sensitivity.json`."""
    return render(
        "lathe/compress/sensitivity/page.html.j2",
        "Sensitivity to quantization",
        sensitivity=section(analysis),
    )


def ranking_chart(linears: Linears, formats: Mapping[str, str], unit: str, theme: Theme) -> str:
    """Bar chart of the cost of quantizing each linear; those kept in float are highlighted.

    Args:
        linears: `{"name", "score", "stderr"}`, worst first; the first 24 are drawn, with their
            95 % intervals.
        formats: their formats by name, keys of `TITLES`.
    """
    shown = linears[:MAX_LINEARS]
    forms = np.array([formats[x["name"]] for x in shown])
    scores = np.array([linear["score"] for linear in shown], dtype=float)
    factor, fraction = next(
        (f for f in FRACTIONS if f[0] * np.abs(scores).max() >= 1), FRACTIONS[-1]
    )
    errors = np.array([linear["stderr"] or 0.0 for linear in shown])
    rows = np.arange(len(shown))

    def paint(axes: Axes, theme: Theme) -> None:
        present = [fmt for fmt in TITLES if fmt in forms]
        looks = dict(zip(present, zip(theme.series, HATCHES, strict=False), strict=False))
        for fmt in present:
            color, hatch = (theme.accent, "////") if fmt == "float" else looks[fmt]
            mask = forms == fmt
            axes.barh(
                rows[mask], factor * scores[mask], 0.68, color=color, hatch=hatch,
                label=TITLES[fmt], edgecolor=theme.grid, linewidth=0,
            )  # fmt: skip
        if errors.any():
            axes.errorbar(
                factor * scores, rows, xerr=1.96 * factor * errors,
                fmt="none", ecolor=theme.ink, elinewidth=0.9,
            )  # fmt: skip
        axes.axvline(0, color=theme.muted, linewidth=0.8)
        _label_rows(axes, shown, theme)
        axes.set_xlabel(f"cost ({fraction}{unit})")
        axes.ticklabel_format(axis="x", style="plain")
        axes.locator_params(axis="x", nbins=6)
        # From the right end, for the names of the linears on the left are long.
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)

    return draw(0.9 + 0.24 * len(shown), theme, paint)


def box_plots(linears: Linears, part: str, theme: Theme) -> str:
    """A box from the first to the third quartile, whiskers to the extremes, in 127ths of the
    largest magnitude: if most values fall on few of INT8's levels, they are poorly distinguished.

    Args:
        linears: with statistics of `part`; the first 24 are drawn.
        part: `weights` or `inputs`.
    """
    shown = [linear[part] for linear in linears[:MAX_LINEARS]]
    names = {"whislo": "min", "q1": "q1", "med": "median", "q3": "q3", "whishi": "max"}
    boxes = [
        {key: 127 * d[name] / (d["absmax"] or 1.0) for key, name in names.items()} for d in shown
    ]

    def paint(axes: Axes, theme: Theme) -> None:
        line = {"color": theme.muted, "linewidth": 1.0}
        axes.bxp(
            boxes, positions=range(len(boxes)), widths=0.56, orientation="horizontal",
            showfliers=False, patch_artist=True, manage_ticks=False,
            boxprops={"facecolor": theme.series[0], "edgecolor": theme.series[0]},
            medianprops={"color": theme.ink, "linewidth": 1.4}, whiskerprops=line, capprops=line,
        )  # fmt: skip
        axes.set_xticks([-127, -64, 0, 64, 127])
        _label_rows(axes, linears[:MAX_LINEARS], theme)
        axes.set_xlabel("levels of INT8 (127: the largest)")

    return draw(0.9 + 0.24 * len(shown), theme, paint)


def _label_rows(axes: Axes, linears: Linears, theme: Theme) -> None:
    axes.set_yticks(range(len(linears)), [str(linear["name"]) for linear in linears])
    axes.tick_params(axis="y", labelcolor=theme.ink)
    axes.set_ylim(len(linears) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
