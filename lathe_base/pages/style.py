"""The style of all charts: one font size, unobtrusive axes, and colors for color-blind readers
(Okabe and Ito 2008), in a light and a dark version."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH = 4.0  # inches; a panel that is still readable on a phone
FONT = "DejaVu Sans"  # the font by which matplotlib measures text
WEB_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colors; `series` has the eight of Okabe and Ito, in the order of the candidates."""

    name: str
    ink: str
    muted: str
    grid: str
    accent: str
    series: tuple[str, ...]

    def color(self, index: int) -> str:
        """The color of a series, by its index."""
        return self.series[index % len(self.series)]


LIGHT = Theme(
    name="light",
    ink="#1d2329",
    muted="#5b6570",
    grid="#e3e7eb",
    accent="#D55E00",
    series=(
        *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"),
        *("#C9B718", "#7A7A7A"),  # yellow and black, adjusted to be visible on white
    ),
)
DARK = Theme(
    name="dark",
    ink="#e8ebee",
    muted="#9aa5b1",
    grid="#343b43",
    accent="#F58A4B",
    series=(
        *("#56B4E9", "#F0B429", "#2CC79A", "#E29CC4", "#9AD0F5", "#F58A4B"),
        *("#F0E442", "#B0B0B0"),
    ),
)


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Apply matplotlib's settings for one chart; they are restored afterwards."""
    settings: Any = {
        "font.family": FONT,
        "font.size": 9.5,
        "text.color": theme.ink,
        "text.parse_math": False,  # names may hold a dollar sign
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",  # text stays text, and gets the reader's font in `draw`
        "svg.hashsalt": "lathe",  # or ids in the SVG, and with them its bytes, would be random
    }
    with matplotlib.rc_context(settings):
        yield


def draw(
    height: float,
    theme: Theme,
    paint: Callable[[Axes, Theme], None],
    background: str | None = None,
) -> str:
    """An SVG document with one pair of axes, `WIDTH` by `height` inches, transparent unless it has
    a background."""
    with styled(theme):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot(), theme)
        out = io.StringIO()
        figure.savefig(
            out,
            format="svg",
            transparent=background is None,
            facecolor=background or "none",
            metadata={"Date": None},
        )
    return out.getvalue().replace(f"'{FONT}'", WEB_FONTS)
