"""The picture of a card: what the gate has measured, beside what it allows."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from lathe.evaluate.comparison import Check
from lathe.evaluate.wording import formats
from lathe.pages.seal import is_sealed, seal
from lathe.pages.style import LIGHT, Theme, draw
from lathe.storage.ownership import FileKind

PICTURE = "quality.svg"
KIND = FileKind("a picture of a card", is_sealed)


def picture(checks: Sequence[Check]) -> str:
    """An SVG document with a row for each check: its change and interval as shares of the largest
    loss that is allowed, so that 1 is the margin; empty where no check allows any loss."""
    rows = [check for check in checks if check.limit]

    def paint(axes: Axes, theme: Theme) -> None:
        for place, check in enumerate(rows):
            at, *ends = (x / check.limit for x in (check.change, check.low, check.high))
            axes.plot(ends, [place, place], color=theme.color(0), linewidth=2.2)
            axes.plot(at, place, "o", color=theme.color(0), markersize=7)
            axes.annotate(
                formats(check)["change"], (at, place), xytext=(0, 8),
                textcoords="offset points", ha="center",
            )  # fmt: skip
        axes.axvline(0, color=theme.muted, linewidth=1)
        axes.axvline(1, color=theme.accent, linewidth=1.5, linestyle=(0, (4, 2)))
        axes.set_yticks(range(len(rows)), [check.measure for check in rows])
        axes.tick_params(axis="y", labelcolor=theme.ink)
        axes.set_ylim(len(rows) - 0.45, -0.75)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("loss of quality; 1 is the most that is allowed")
        axes.margins(x=0.1)
        axes.locator_params(axis="x", nbins=6)

    return seal(draw(0.75 + 0.5 * len(rows), LIGHT, paint, background="white")) if rows else ""
