"""The model in production and a candidate -> is the candidate as good?"""

from kfp import dsl

from components.images import TRAIN


@dsl.component(base_image=TRAIN, install_kfp_package=False)
def challenge(
    recipe: str,
    overrides: list[str],
    production: str,
    candidate: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    verdict: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    cloze: str = "",
) -> bool:
    """Measure the live release as the candidate was, and compare them by the gate.

    Args:
        recipe: Name or path of the recipe (groups Offline_Eval, Gate and Serving).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        production: Address of the releases.
        candidate: Evaluation of the model to let through.
        data: Token data set that it was evaluated on.
        cloze: LAMBADA-format file that it was evaluated on; the data set's when empty.
        verdict: JSON file: pass, fail or inconclusive, with the intervals behind it.
        metrics: 1 when it passed, else 0.

    Returns:
        True when the candidate may go live; where nothing is live, it may.
    """
    import logging
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.artifacts.remote import input_path
    from lathe.production.challenge import challenge

    with stage(recipe, [*overrides, f"Production.releases={production}"]) as settings:
        examples = input_path(cloze) if cloze else None
        scores, corpus = local(candidate, data)
        result = challenge(settings, scores, Path(verdict.path), corpus, examples)
        for reason in result.reasons:
            logging.getLogger("lathe").info("beside production: %s", reason)
        record(result, metrics, verdict)
        return result.passed
