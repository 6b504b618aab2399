"""Two evaluations -> is the candidate as good as the baseline?"""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.5, is_cached=False, seconds=2)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def gate(
    recipe: str,
    overrides: list[str],
    baseline: dsl.Input[dsl.Dataset],
    candidate: dsl.Input[dsl.Dataset],
    verdict: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    production: str = "",
) -> bool:
    """Say whether a candidate model has lost too much.

    Args:
        recipe: Name or path of the recipe (group Gate).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        baseline: Evaluation of the model to compare with.
        candidate: Evaluation of the model to let through.
        verdict: JSON file: pass, fail or inconclusive, with the intervals behind it.
        metrics: 1 when it passed, else 0.
        production: Address of the releases, to which a candidate that passes is to go; none does
            when empty.

    Returns:
        True when the candidate has passed and `production` names the releases.
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
