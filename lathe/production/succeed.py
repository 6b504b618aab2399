"""Release a model if it is as good as the one in production."""

import logging
from pathlib import Path

from lathe.config.settings import Recipe
from lathe.production.challenge import challenge
from lathe.production.publish import Production, publish_release

log = logging.getLogger("lathe")


def succeed(
    recipe: Recipe,
    deployed: Path,
    evaluation: Path,
    data: Path | None,
    cloze: Path | None,
    verdict: Path,
    gate: Path | None = None,
    model: Path | None = None,
) -> Production | None:
    """Measure the live release as the candidate was, and publish the candidate if the gate passes
    it; None where the live one stays.

    Args:
        deployed: output of `lathe deploy`.
        evaluation: the candidate's evaluation folder.
        data, cloze: what it was evaluated on.
        verdict: JSON file to write, as `lathe.evaluate.gate` does.
        gate: the verdict that let the candidate come this far.
        model: the candidate's checkpoint.

    Raises:
        UserError, StageError: as `challenge` and `publish_release`.
    """
    result = challenge(recipe, evaluation, verdict, data, cloze)
    for reason in result.reasons:
        log.info("beside production: %s", reason)
    if not result.passed:
        log.info("not released: the live model stays")
        return None
    return publish_release(recipe, deployed, evaluation, gate, model)
