"""Compare compressed models with the dense one, and choose among them."""

from collections.abc import Sequence
from pathlib import Path

from lathe.evaluate.evaluation_folder import read_metrics
from lathe.evaluate.gate import gate
from lathe.evaluate.latency import measure
from lathe.model.folder import require_checkpoint
from lathe.search.design import Proposal
from lathe.search.goal import Budget, Goal
from lathe.search.result import PAGE, RESULT, SearchResult, Trial, conclude
from lathe_base.artifacts.kinds import PAGE as HTML
from lathe_base.artifacts.kinds import SEARCH
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.storage import claim_output_file

MEASURES: dict[Budget, str] = {"accuracy": "cloze accuracy", "perplexity": "perplexity"}
"""The measure of each budget, as the gate names it."""


def choose(
    recipe: Recipe,
    goal: Goal,
    proposals: Sequence[Proposal],
    dense: Sequence[Path],
    models: Sequence[Path],
    evaluations: Sequence[Path],
    exports: Sequence[Path],
    output: Path,
) -> SearchResult:
    """Compare models that were trained elsewhere, like the trials of a search.

    Args:
        proposals: the models' designs, in the same order.
        dense: evaluation and export folder of the dense model.
        output: folder for `compress.json` and `compress.html`.

    Raises:
        UserError: lists of different lengths, or a model that is not a checkpoint.
    """
    counts = [len(part) for part in (proposals, models, evaluations, exports)]
    if len(set(counts)) > 1 or not proposals:
        raise UserError(
            f"there are {', '.join(map(str, counts))} designs, models, evaluations and exports",
            "give the same number of each, at least one",
            Code.MISMATCH,
        )
    for model in models:
        require_checkpoint(model)
    claim_output_file(output / RESULT, SEARCH)
    claim_output_file(output / PAGE, HTML)
    trials = [
        evaluate_trial(recipe, goal, *parts, *dense)
        for parts in zip(proposals, evaluations, exports, strict=True)
    ]
    return conclude(goal, recipe.Gate, dense[0], trials, output)


def evaluate_trial(
    recipe: Recipe,
    goal: Goal,
    proposal: Proposal,
    evaluation: Path,
    exported: Path,
    dense_evaluation: Path,
    dense_export: Path,
) -> Trial:
    """Compare a compressed model with the dense one, given their evaluations and exports."""
    name = proposal.design.name
    before, after = read_metrics(dense_evaluation), read_metrics(evaluation)
    timings = measure({"dense": dense_export, name: exported}, prompt_tokens=128)[name]
    return Trial(
        name=name,
        accuracy=(after["cloze"] or {}).get("accuracy"),
        perplexity=(after["text"] or {}).get("perplexity"),
        latency=1 / timings["decode_speedup"],
        prefill=1 / timings["prefill_speedup"],
        bytes=timings["bytes_ratio"],
        parameters=after["model"]["n_params"] / before["model"]["n_params"],
        verdict=judge_candidate(recipe, goal, dense_evaluation, evaluation),
        design=proposal.design,
        predicted=proposal.predicted,
        cost=proposal.cost,
    )


def judge_candidate(recipe: Recipe, goal: Goal, baseline: Path, candidate: Path) -> str:
    """The gate's verdict on two evaluations, with the budget as the only margin.

    Raises:
        UserError: the evaluations lack the measure of the budget; see also `gate`.
    """
    margins = {"*": None, MEASURES[goal.budget]: goal.allowed}
    only = recipe.Gate.model_copy(update={"margins": margins})
    return gate(recipe.model_copy(update={"Gate": only}), baseline, candidate).verdict
