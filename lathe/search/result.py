"""The result of a search: the best trial, `compress.json` and `compress.html`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lathe.evaluate.evaluation_folder import read_metrics
from lathe.evaluate.wording import PAST
from lathe.search.goal import Goal
from lathe.search.page import pareto_page
from lathe.search.trial import SearchResult, Trial
from lathe_base.config.settings import GateSettings
from lathe_base.errors import StageError
from lathe_base.storage import atomic_file

RESULT = "compress.json"
PAGE = "compress.html"


def conclude(
    goal: Goal,
    settings: GateSettings,
    dense_evaluation: Path,
    trials: Sequence[Trial],
    output: Path,
) -> SearchResult:
    """Choose the best of the trials; write `compress.json` and `compress.html` into `output`.

    A trial meets the budget if the verdict is a pass, or inconclusive with `Gate.on_inconclusive:
    pass`.
    """
    enough = {"pass", "inconclusive"} if settings.on_inconclusive == "pass" else {"pass"}
    good = [trial for trial in trials if trial.meets(goal) and trial.verdict in enough]
    best = min(good, key=lambda trial: trial.badness(goal), default=None)
    before = read_metrics(dense_evaluation)
    dense = {
        "accuracy": (before["cloze"] or {}).get("accuracy"),
        "perplexity": (before["text"] or {}).get("perplexity"),
    }
    result = SearchResult(goal, dense, tuple(trials), best)
    output.mkdir(parents=True, exist_ok=True)
    with atomic_file(output / RESULT) as work:
        work.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    with atomic_file(output / PAGE) as work:
        work.write_text(pareto_page(result), encoding="utf-8")
    return result


def require_met(result: SearchResult) -> Trial:
    """Return the best trial.

    Raises:
        StageError: no trial met the goal.
    """
    if result.best is not None:
        return result.best
    goal = result.goal
    nearest = min(result.trials, key=lambda trial: trial.reached(goal))
    raise StageError(
        f"no trial met {goal.target} {goal.at_most:g} within the budget; {nearest.name} has "
        f"{goal.target} {nearest.reached(goal):.3f}, budget: {PAST[nearest.verdict]}. Relax the "
        "target or the budget, evaluate on more text, finetune longer (Engine.max_steps), or allow "
        "more trials (--trials)"
    )
