"""Decides whether a candidate may replace the model in production, and releases it if so."""

import json
import logging
import tempfile
from pathlib import Path

from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.gate import GateResult, gate
from lathe.release.publish import LiveReleaseChanged, Production, publish_release
from lathe.release.release import Pointer, open_releases
from lathe_base.artifacts.kinds import VERDICT
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.storage import atomic_file, claim_output_file

log = logging.getLogger("lathe")

LOOKS = "looks.json"
"""File next to the pointer with the number of comparisons with each live model."""

MAX_COMPARISONS = 3
"""Number of live releases with which a candidate is compared, if others are released meanwhile."""


def challenge(
    recipe: Recipe,
    candidate: Path,
    output: Path,
    data: Path | None,
    cloze: Path | None = None,
    pointer: Pointer | None = None,
) -> GateResult:
    """Evaluate the live release's ONNX like the candidate, and compare the two with the gate.

    With `Gate.sequential` the comparisons with the same live model are counted in the store, and
    each is made at the confidence of `lathe.evaluate.gate.confidence_at`.

    Args:
        recipe: groups Production, Offline_Eval and Gate.
        candidate: evaluation folder.
        output: JSON file to write, as `lathe.evaluate.gate` does.
        data, cloze: what the candidate was evaluated on.
        pointer: names the live release; read from the store by default.

    Returns:
        The verdict: a pass if nothing is in production.

    Raises:
        UserError: the store does not answer, or the two cannot be compared.
        StageError: the live release's bytes in the store have changed.
    """
    claim_output_file(output, VERDICT, candidate, data, cloze)
    releases = open_releases(recipe)
    live = (pointer or releases.pointer()).live
    if live is None:
        # The first release has nothing to lose against.
        result = GateResult(True, ("passed: nothing is in production yet",))
        content = {"verdict": result.verdict, "passed": True, "reasons": result.reasons}
        with atomic_file(output) as work:
            work.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return result
    with tempfile.TemporaryDirectory(prefix="lathe-live-") as scratch:
        repository = releases.fetch(live.release, Path(scratch) / "repository")
        # Triton's layout: the only version of the model is an export folder.
        exported = repository / recipe.Serving.model_name / "1"
        baseline = Path(scratch) / "evaluation"
        log.info("in production since %s: %s", live.since, releases.address(live.release))
        try:
            evaluate(recipe, exported, baseline, data, cloze)
            history = f"{releases.root}/{LOOKS}" if recipe.Gate.sequential else None
            return gate(recipe, baseline, candidate, output, history)
        except UserError as error:
            # The common reason is another vocabulary: name the tokenizer that the data needs.
            tokenizer = (
                f"{releases.address(live.release)}{recipe.Serving.model_name}/1/tokenizer.json"
            )
            raise UserError(
                f"the model in production cannot be compared with the candidate: {error.what}",
                f"{error.hint}; its tokenizer is {tokenizer}",
                error.code,
            ) from error


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
    """Evaluate the live release like the candidate, and publish the candidate if it passes the
    gate; None if the live one stays.

    Only the release that it was compared with is replaced: if another one goes live meanwhile, the
    candidate is compared with that one.

    Args:
        deployed: output of `lathe deploy`.
        evaluation: the candidate's evaluation folder.
        data, cloze: what it was evaluated on.
        verdict: JSON file to write, as `lathe.evaluate.gate` does.
        gate: the candidate's earlier verdict.
        model: the candidate's checkpoint.

    Raises:
        UserError, StageError: as `challenge` and `publish_release`.
    """
    # The comparison takes minutes, in which somebody else's release may go live.
    for comparison in range(1, MAX_COMPARISONS + 1):
        pointer = open_releases(recipe).pointer()
        result = challenge(recipe, evaluation, verdict, data, cloze, pointer)
        for reason in result.reasons:
            log.info("compared with production: %s", reason)
        if not result.passed:
            break
        try:
            live = pointer.live_release
            return publish_release(recipe, deployed, evaluation, gate, model, live)
        except LiveReleaseChanged as error:
            if comparison == MAX_COMPARISONS:
                raise
            log.warning("%s: comparing again", error.what)
    log.info("not released: the live model stays")
    return None
