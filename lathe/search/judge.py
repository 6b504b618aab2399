"""Compare compressed models with the dense one, and choose among them."""

from collections.abc import Sequence
from pathlib import Path

from lathe.artifacts.kinds import PAGE as HTML
from lathe.artifacts.kinds import SEARCH
from lathe.config.settings import Recipe
from lathe.errors import UserError
from lathe.evaluate.gate import gate
from lathe.evaluate.latency import measure
from lathe.evaluate.results import read_metrics
from lathe.model.folder import require_checkpoint
from lathe.search.goal import Goal
from lathe.search.result import PAGE, RESULT, conclude
from lathe.search.trial import SearchResult, Trial
from lathe.storage import claim_output_file


def choose(
    recipe: Recipe,
    goal: Goal,
    dense: Sequence[Path],
    candidates: Sequence[tuple[float, Path, Path]],
    output: Path,
) -> SearchResult:
    """Judge models that were made elsewhere, like the trials of a search.

    Args:
        dense: evaluation and export folder.
        candidates: ratio, evaluation and export folder of each INT8 model.
        output: folder for `compress.json` and `compress.html`.
    """
    evaluation, exported = dense
    claim_output_file(output / RESULT, SEARCH)
    claim_output_file(output / PAGE, HTML)
    trials = [
        evaluate_trial(recipe, goal, trial_name(ratio), evaluation, exported, *folders)
        for ratio, *folders in candidates
    ]
    return conclude(goal, evaluation, trials, output)


def gather(
    ratios: Sequence[float],
    models: Sequence[Path],
    evaluations: Sequence[Path],
    exports: Sequence[Path],
) -> list[tuple[float, Path, Path]]:
    """Collect the candidates of `choose` and check their checkpoints.

    Raises:
        UserError: lists of different lengths, an invalid ratio, or a model that is not a
        checkpoint.
    """
    counts = [len(part) for part in (ratios, models, evaluations, exports)]
    if len(set(counts)) > 1 or not ratios:
        raise UserError(
            f"there are {', '.join(map(str, counts))} ratios, models, evaluations and exports",
            "give as many of each, and one at least",
        )
    for ratio, model in zip(ratios, models, strict=True):
        if not (isinstance(ratio, float | int) and 0 <= ratio < 1):
            raise UserError(f"ratio {ratio!r}: not a share below 1", "give what was pruned")
        require_checkpoint(model)
    return list(zip(ratios, evaluations, exports, strict=True))


def evaluate_trial(
    recipe: Recipe,
    goal: Goal,
    name: str,
    dense_evaluation: Path,
    dense_export: Path,
    evaluation: Path,
    exported: Path,
) -> Trial:
    """A compressed model beside the dense one, by what evaluation and export wrote."""
    before, after = read_metrics(dense_evaluation), read_metrics(evaluation)
    figures = measure({"dense": dense_export, name: exported}, prompt_tokens=128)[name]
    return Trial(
        name=name,
        accuracy=(after["cloze"] or {}).get("accuracy"),
        perplexity=(after["text"] or {}).get("perplexity"),
        latency=1 / figures["decode_speedup"],
        prefill=1 / figures["prefill_speedup"],
        bytes=figures["bytes_ratio"],
        parameters=after["model"]["n_params"] / before["model"]["n_params"],
        verdict=verdict_of(recipe, goal, dense_evaluation, evaluation),
    )


def verdict_of(recipe: Recipe, goal: Goal, baseline: Path, candidate: Path) -> str:
    """The gate's verdict on two evaluations, with the budget as its only margin."""
    margins = {
        "cloze_measure": "accuracy",
        "max_accuracy_drop": goal.allowed if goal.budget == "accuracy" else 1.0,
        "max_perplexity_increase": goal.allowed if goal.budget == "perplexity" else 1e9,
    }
    tolerant = recipe.model_copy(update={"Gate": recipe.Gate.model_copy(update=margins)})
    return gate(tolerant, baseline, candidate).verdict


def trial_name(ratio: float) -> str:
    """The name of an INT8 model of which this share of heads and channels was pruned."""
    return f"pruned-{ratio:.4g}-int8" if ratio else "int8"
