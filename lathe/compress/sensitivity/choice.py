"""Choose the format of every linear from what it costs: which stay float, which need INT8."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe.compress.sensitivity.result import LinearScore
from lathe.config.settings import SensitivitySettings

log = logging.getLogger("lathe")

SKIPS = (
    "what single linears cost is taken to add up; the worst stay float, one by one, until what is "
    "left is predicted to cost at most Sensitivity.budget (as costs add up, no smaller choice "
    "does), or Sensitivity.max_skips are float"
)
FORMATS = (
    "what single linears cost is taken to add up; of all ways to make every linear INT4, INT8 or, "
    "of at most Sensitivity.max_skips, float, the one with the fewest bytes that is predicted to "
    "cost at most Sensitivity.budget; where none does, the one that costs least"
)
Figures = NDArray[np.float64]  # of (linears, formats)
BYTES = (0.5, 1.0, 4.0)  # of a weight in INT4, INT8 and float32


@dataclass(frozen=True)
class Choice:
    """The linears that stay float, those that are INT8 where the others are INT4, the cost that is
    predicted for all that are quantized, and the rule."""

    skip: list[str]
    int8: list[str]
    predicted: float
    rule: str


def choose(ranked: Sequence[LinearScore], settings: SensitivitySettings) -> Choice:
    """Choose the formats of linears that are sorted worst first; warns if the budget is exceeded.

    Negative scores are noise, not gains, and count as zero.
    """
    has_two = all(linear.int8_score is not None for linear in ranked)
    choice = choose_formats(ranked, settings) if has_two else choose_skips(ranked, settings)
    if choice.predicted > settings.budget:
        log.warning(
            "quantization is predicted to cost %.2g, above Sensitivity.budget %.2g, with "
            "Sensitivity.max_skips %d linears in float",
            choice.predicted,
            settings.budget,
            settings.max_skips,
        )
    return choice


def choose_skips(ranked: Sequence[LinearScore], settings: SensitivitySettings) -> Choice:
    """Apply the rule `SKIPS`."""
    costs = [max(linear.score, 0.0) for linear in ranked]
    for n in range(len(ranked) + 1):
        predicted = math.fsum(costs[n:])
        if predicted <= settings.budget or n == settings.max_skips:
            break
    return Choice([linear.name for linear in ranked[:n]], [], predicted, SKIPS)


def choose_formats(ranked: Sequence[LinearScore], settings: SensitivitySettings) -> Choice:
    """Apply the rule `FORMATS`, as an integer program with a 0 or 1 for each linear and format."""
    costs = np.array([[x.score, x.int8_score, 0.0] for x in ranked], float).clip(0)
    n_bytes = np.array([x.n_params for x in ranked])[:, None] * BYTES
    one_each = np.kron(np.eye(len(ranked)), np.ones(3))
    n_float = np.tile([0, 0, 1], len(ranked))
    limits = [
        scipy.optimize.LinearConstraint(one_each, 1, 1),
        scipy.optimize.LinearConstraint(n_float, 0, settings.max_skips),
    ]
    unit = settings.budget or 1.0  # the solver's tolerance is absolute
    within = scipy.optimize.LinearConstraint(costs.ravel() / unit, 0, settings.budget / unit)

    def solve(goal: Figures, *constraints: object) -> Figures | None:
        found = scipy.optimize.milp(
            goal.ravel(),
            integrality=np.ones(goal.size),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        return None if found.x is None else found.x.reshape(goal.shape)

    size = n_bytes / n_bytes.max()
    chosen = solve(size, *limits, within)
    if chosen is None:
        chosen = solve(costs / costs.max() + 1e-6 * size, *limits)
    assert chosen is not None
    formats = chosen.argmax(1)
    named = list(zip([linear.name for linear in ranked], formats, strict=True))
    return Choice(
        skip=[name for name, form in named if form == 2],
        int8=[name for name, form in named if form == 1],
        predicted=math.fsum(costs[np.arange(len(ranked)), formats]),
        rule=FORMATS,
    )
