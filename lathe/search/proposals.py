"""The designs that are worth training: found by the integer program, and measured."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lathe.artifacts.kinds import checked, read_json
from lathe.errors import StageError
from lathe.search.design import Design
from lathe.search.goal import EXACT, Goal
from lathe.search.program import Problem
from lathe.storage import atomic_file

CLOSE = 0.97  # of a limit: a design this near to it is not corrected
MEASUREMENTS = 6  # of designs, for one limit

Measure = Callable[[Design], float]
"""Returns the share of the target that a design has, of the dense model's."""


@dataclass(frozen=True)
class Proposal:
    """A design to train.

    Attributes:
        predicted: the share of the target that the prices predicted for it.
        cost: the KL divergence from the dense model that is predicted before training, nats a
            token.
    """

    design: Design
    predicted: float
    cost: float


def propose(problem: Problem, goal: Goal, trials: int, measure: Measure) -> list[Proposal]:
    """At most `trials` designs that were measured to reach the target, the largest first.

    Prices are off by a few per cent, so every design is measured before it is trained; where it
    misses the limit, or leaves much of it, the prices are scaled by that, and the next is tried.
    A time varies from one measurement to the next, so each further trial aims `CLOSE` below the
    last; one design is enough for a target in `EXACT`.

    Raises:
        StageError: no design reaches the target.
    """
    found: list[Proposal] = []
    scale = 1.0
    for trial in range(1 if goal.target in EXACT else trials):
        limit = goal.at_most * CLOSE**trial
        proposal, scale = _within(problem, limit, scale, measure)
        if proposal is None and not found:
            raise StageError(_impossible(problem, goal, scale))
        if proposal is None:
            break
        if proposal.design not in [other.design for other in found]:
            found.append(proposal)
    return found


def write_proposals(proposals: Sequence[Proposal], output: Path) -> None:
    """Write proposals to a JSON file."""
    with atomic_file(output) as work:
        text = json.dumps([asdict(proposal) for proposal in proposals], indent=2)
        work.write_text(text + "\n", encoding="utf-8")


def read_proposals(path: Path) -> list[Proposal]:
    """Read the file of `write_proposals`."""
    hint = "run the pipeline again"
    return checked(read_json(path, hint, list), list[Proposal], str(path), hint)


def _within(
    problem: Problem, limit: float, scale: float, measure: Measure
) -> tuple[Proposal | None, float]:
    """The design with the least cost that is measured to be within a limit; None if there is none.

    Args:
        scale: of the prices, by earlier measurements; the corrected one is returned too.
    """
    tried: list[Design] = []
    fitting: list[Proposal] = []
    while len(tried) < MEASUREMENTS:
        design = problem.solve(limit / scale)
        if design is None or design in tried:
            break
        tried.append(design)
        price, share = problem.price(design), measure(design)
        if share <= limit:
            fitting.append(Proposal(design, price * scale, problem.cost(design)))
        if CLOSE * limit <= share <= limit:
            break
        scale = share / price
    return min(fitting, key=lambda proposal: proposal.cost, default=None), scale


def _impossible(problem: Problem, goal: Goal, scale: float) -> str:
    """Why there is no design."""
    least = problem.price(problem.cheapest()) * scale
    return (
        f"no design reaches {goal.target} {goal.at_most:g}: the smallest is predicted to have "
        f"{least:.3f}. Allow more, or more formats (Compress.Quantization.weight_bits=4, "
        "quantize_embedding=True)"
    )
