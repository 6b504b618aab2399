"""The HTML page of a load test: latencies of its clients in plots and a table."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw
from lathe_serving.client.load import Objective, Request, Summary


def load_page(
    what: str, summary: Summary, requests: Sequence[Request], objective: Objective
) -> str:
    """A self-contained HTML page.

    Args:
        what: description of the load.
    """
    answered = [request for request in requests if request.answered]
    first = np.array([request.first_token for request in answered])
    between = np.concatenate([request.between_tokens for request in answered])
    pictures = [
        _distribution("Time to the first token", first, objective.first_token),
        _distribution("Time between tokens", between, objective.between_tokens),
    ]
    return render(
        "lathe_serving/client/load_page.html.j2",
        "Load test",
        what=what,
        summary=summary,
        objective=objective,
        pictures=pictures,
    )


def _distribution(title: str, seconds: NDArray[np.float64], limit: float) -> Picture:
    ordered = np.sort(1e3 * seconds)
    share = 100 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1)

    def paint(axes: Axes, theme: Theme) -> None:
        axes.step(ordered, share, where="post", color=theme.color(0))
        axes.axvline(1e3 * limit, color=theme.accent, linewidth=1, linestyle=(0, (4, 2)))
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of values")
        axes.set_ylim(0, 101)
        axes.set_xlim(left=0)

    alt = f"{title}: cumulative distribution over {len(ordered)} values"
    return picture(title, alt, lambda theme: draw(2.4, theme, paint))
