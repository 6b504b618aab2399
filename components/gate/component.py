"""Two evaluations -> verdict on whether the candidate is non-inferior to the baseline."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.5, is_cached=False, seconds=2)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def gate(
    recipe: str,
    baseline: dsl.Input[dsl.Dataset],
    candidate: dsl.Input[dsl.Dataset],
    verdict: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    production: str = "",
    overrides: list[str] = [],  # noqa: B006
) -> bool:
    """Test whether a candidate is non-inferior to its baseline.

    Args:
        recipe: Name or path of the recipe (group Gate).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        baseline: Evaluation of the baseline.
        candidate: Evaluation of the candidate.
        verdict: JSON file: pass, fail or inconclusive, with the intervals.
        metrics: 1 if it passed, else 0.
        production: Address of the releases for a candidate that passes; nothing is released when
            empty.

    Returns:
        True if the candidate passed and `production` is set.
    """
    import logging
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.evaluate.gate import gate

    with stage(recipe, overrides) as settings:
        result = gate(settings, *local(baseline, candidate), Path(verdict.path))
        for line in (f"gate: {result.outcome}", *result.reasons):
            logging.getLogger("lathe").info(line)
        record(result, metrics, verdict)
        return result.passed and bool(production)
