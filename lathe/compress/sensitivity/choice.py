"""Choose the format of every linear by its cost: which stay float, and which need more bits or
dynamic scales."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe.compress.sensitivity.result import LinearScore
from lathe_base.config.settings import SensitivitySettings
from lathe_base.config.settings.types import FORMATS, Format

log = logging.getLogger("lathe")

SKIPS = (
    "the costs of individual linears are assumed to be additive; the most expensive stay float, "
    "one by one, until the predicted cost of the rest is at most Sensitivity.budget (with additive "
    "costs, no smaller choice exists), or Sensitivity.max_skips are float"
)
FEWEST_BYTES = (
    "the costs of individual linears are assumed to be additive; of all ways to assign one of the "
    "formats or, to at most Sensitivity.max_skips, float to every linear, the one with the fewest "
    "bytes, including scales, whose predicted cost is at most Sensitivity.budget; if there is "
    "none, the one with the lowest cost"
)
Matrix = NDArray[np.float64]  # of (linears, formats)


@dataclass(frozen=True)
class FormatChoice:
    """The formats of all linears, the predicted cost of the quantized ones, and the rule."""

    formats: dict[str, Format]
    predicted: float
    rule: str

    @property
    def skip(self) -> list[str]:
        """The linears that stay float."""
        return [name for name, fmt in self.formats.items() if fmt == "float"]

    @property
    def quantized(self) -> dict[str, Format]:
        """The formats of the quantized linears."""
        return {name: fmt for name, fmt in self.formats.items() if fmt != "float"}


def choose(
    ranked: Sequence[LinearScore],
    forms: Sequence[Format],
    settings: SensitivitySettings,
    group_size: int,
) -> FormatChoice:
    """Choose among `forms` and float for linears sorted worst first; warns if the budget is
    exceeded.

    Negative scores are noise, not gains, and count as zero.
    """
    if len(forms) > 1:
        costs = {x.name: [x.scores[fmt] for fmt in forms] for x in ranked}
        sizes = {x.name: x.n_params for x in ranked}
        limits = settings.budget, settings.max_skips
        choice = FormatChoice(
            *choose_formats(costs, forms, sizes, group_size, *limits), FEWEST_BYTES
        )
    else:
        choice = choose_skips(ranked, forms[0], settings)
    if choice.predicted > settings.budget:
        log.warning(
            "predicted cost of quantization %.2g is above Sensitivity.budget %.2g, with "
            "Sensitivity.max_skips %d linears in float",
            choice.predicted,
            settings.budget,
            settings.max_skips,
        )
    return choice


def choose_skips(
    ranked: Sequence[LinearScore], fmt: Format, settings: SensitivitySettings
) -> FormatChoice:
    """Apply the rule `SKIPS`."""
    costs = [max(linear.score, 0.0) for linear in ranked]
    for n in range(len(ranked) + 1):
        predicted = math.fsum(costs[n:])
        if predicted <= settings.budget or n == settings.max_skips:
            break
    in_float: Format = "float"
    formats = {x.name: in_float if i < n else fmt for i, x in enumerate(ranked)}
    return FormatChoice(formats, predicted, SKIPS)


def bytes_per_weight(fmt: Format, group_size: int) -> float:
    """Bytes per weight, including its share of the group scales."""
    facts = FORMATS[fmt]
    return (facts.bits or 32) / 8 + (4 / group_size if facts.is_grouped else 0.0)


def choose_formats(
    costs_by_linear: Mapping[str, Sequence[float]],
    forms: Sequence[Format],
    sizes: Mapping[str, int],
    group_size: int,
    budget: float,
    max_float: int,
) -> tuple[dict[str, Format], float]:
    """Apply the rule `FEWEST_BYTES`: an integer program with a 0 or 1 for each linear and format.

    Args:
        costs_by_linear: by linear, in each of `forms`; float costs nothing.
        sizes: numbers of weights.

    Returns:
        The format of every linear, and the total cost.
    """
    forms = [*forms, "float"]
    names, n = list(costs_by_linear), len(forms)
    costs = np.array([[*costs_by_linear[name], 0.0] for name in names], float).clip(0)
    n_bytes = np.outer(
        [sizes[name] for name in names], [bytes_per_weight(x, group_size) for x in forms]
    )
    one_each = np.kron(np.eye(len(names)), np.ones(n))
    n_float = np.tile(np.eye(n)[-1], len(names))
    limits = [
        scipy.optimize.LinearConstraint(one_each, 1, 1),
        scipy.optimize.LinearConstraint(n_float, 0, max_float),
    ]
    unit = budget or 1.0  # the solver's tolerance is absolute
    within = scipy.optimize.LinearConstraint(costs.ravel() / unit, 0, budget / unit)

    def solve(goal: Matrix, *constraints: object) -> Matrix | None:
        solution = scipy.optimize.milp(
            goal.ravel(),
            integrality=np.ones(goal.size),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        return None if solution.x is None else solution.x.reshape(goal.shape)

    size = n_bytes / n_bytes.max()
    chosen = solve(size, *limits, within)
    if chosen is None:
        # The budget cannot be met: the lowest cost, and of equal ones the fewest bytes.
        chosen = solve(costs / costs.max() + 1e-6 * size, *limits)
    assert chosen is not None
    taken = chosen.argmax(1)
    predicted = math.fsum(costs[np.arange(len(names)), taken])
    return {name: forms[i] for name, i in zip(names, taken, strict=True)}, predicted
