"""Finds the designs worth training with the integer program, and measures them."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from lathe.model.checkpoint import load_checkpoint
from lathe.search.costs import read_costs
from lathe.search.design import Design, Proposal
from lathe.search.goal import EXACT, Goal
from lathe.search.prices import measure_design, read_prices
from lathe.search.program import Problem
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import checked, open_export, read_json
from lathe_base.config.settings import Recipe
from lathe_base.errors import StageError, UserError
from lathe_base.storage import atomic_file

log = logging.getLogger("lathe")

CLOSE = 0.97  # of a limit: a design this near to it is not corrected
MEASUREMENTS = 6  # of designs, for one limit

Measure = Callable[[Design], float]
"""Returns a design's value for the target, as a share of the dense model's."""


def propose(problem: Problem, goal: Goal, trials: int, measure: Measure) -> list[Proposal]:
    """At most `trials` designs whose measurement reaches the target, the largest first.

    Prices are off by a few percent, so every design is measured before it is trained; if it misses
    the limit, or leaves much of it unused, the prices are rescaled by the measurement, and the next
    design is tried. Measured times vary, so each further trial aims `CLOSE` below the last; one
    design is enough for a target in `EXACT`.

    Raises:
        UserError: `trials` is not positive.
        StageError: no design reaches the target.
    """
    if trials < 1:
        raise UserError(f"trials: {trials}, so no design would be trained", "give at least 1")
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


def write_designs(
    goal: Goal,
    recipes: Sequence[Recipe],
    model: Path,
    dense: Path,
    costs: Path,
    prices: Path,
    trials: int,
    output: Path,
) -> list[Proposal]:
    """Run `propose` on the outputs of `write_costs` and `write_prices`, and write a JSON file.

    Args:
        recipes: for evaluation and export, for pruning, and for quantization.
        model, dense: the dense checkpoint and its export.
        output: the file; next to it is a journal of all measurements, which later calls reuse.
    """
    base, pruning, quantization = recipes
    checkpoint, settings = load_checkpoint(model), quantization.Compress.Quantization
    known = read_costs(costs), read_prices(prices)[goal.target]
    problem = Problem.of(checkpoint.model.config, *known, pruning, quantization)
    open_export(dense)  # before the journal is written
    findings = output.with_name(f"{output.name}.findings.jsonl")
    journal = Journal(findings, {"model": checkpoint.digest})

    def measure(design: Design) -> float:
        def find() -> dict[str, float]:
            return measure_design(checkpoint, dense, design, settings, base.Export)

        return journal.recall(design.name, find, dict)[goal.target]

    found = propose(problem, goal, trials, measure)
    with atomic_file(output) as work:
        text = json.dumps([asdict(proposal) for proposal in found], indent=2)
        work.write_text(text + "\n", encoding="utf-8")
    return found


def read_proposals(path: Path) -> list[Proposal]:
    """Read the file of `write_designs`."""
    hint = "run the pipeline again"
    return checked(read_json(path, hint, list), list[Proposal], str(path), hint)


def _within(
    problem: Problem, limit: float, scale: float, measure: Measure
) -> tuple[Proposal | None, float]:
    """The design with the lowest cost whose measurement is within a limit; None if there is none.

    Args:
        scale: scale of the prices from earlier measurements; the corrected one is also returned.
    """
    tried: list[Design] = []
    fitting: list[Proposal] = []
    while len(tried) < MEASUREMENTS:
        design = problem.solve(limit / scale)
        if design is None or design in tried:
            break
        tried.append(design)
        price, share = problem.price(design), measure(design)
        words = "%s: predicted %.3f of the target, measured %.3f before training"
        log.info(words, design.name, price * scale, share)
        if share <= limit:
            fitting.append(Proposal(design, price * scale, problem.cost(design)))
        if CLOSE * limit <= share <= limit:
            break
        scale = share / price
    return min(fitting, key=lambda proposal: proposal.cost, default=None), scale


def _impossible(problem: Problem, goal: Goal, scale: float) -> str:
    """The error message if no design reaches the target."""
    least = problem.price(problem.cheapest()) * scale
    return (
        f"no design reaches {goal.target} {goal.at_most:g}: the smallest has a predicted "
        f"{least:.3f}. Raise the target, or allow more formats "
        "(Compress.Quantization.weight_bits=4, quantize_embedding=True)"
    )
