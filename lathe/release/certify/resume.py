"""Certifies that killed and resumed training produces the same model as uninterrupted training.

A recipe is trained once without interruption, and once while its processes are killed at random
moments and restarted. The certificate has the digests of both models and every kill.
"""

import json
import logging
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lathe.data.tokens import TokenDataset
from lathe.release.certify.kills import Kill, Training, plan_kills
from lathe.release.certify.tensors import Difference, Digests, first_difference, weight_digests
from lathe_base import __version__
from lathe_base.artifacts.kinds import RESUME_CERTIFICATE, read_json
from lathe_base.config.settings import Recipe
from lathe_base.errors import StageError
from lathe_base.progress import bar
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_file, claim_output_file, digest
from lathe_launch.shape import required_shape

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class ResumeResult:
    """The result of a certification.

    Attributes: kills: the kills performed; fewer than requested if training ended before.
    difference: that between the two models; None if they are bitwise identical.
    """

    kills: list[Kill]
    whole: Digests
    resumed: Digests
    difference: Difference | None

    @property
    def passed(self) -> bool:
        """Whether the training was killed, and both models are identical."""
        return bool(self.kills) and self.difference is None

    def require(self) -> None:
        """Raise StageError unless it has passed."""
        if self.difference:
            by = self.difference.largest
            how = "has a different shape or type" if by is None else f"differs by up to {by:.3g}"
            raise StageError(
                f"the resumed training produced a different model: {self.difference.tensor} {how}"
            )
        if not self.kills:
            raise StageError("the training ended before the first kill: train for more steps")


def _result(certificate: Path) -> dict[str, dict[str, Any]]:
    values = read_json(certificate, "certify it again")
    return {"resume": {"passed": values["passed"], "kills": len(values["kills"])}}


@attested("certify-resume", "data", results=_result)
def certify_resume(
    recipe: Recipe, options: Sequence[str], data: Path, output: Path, kills: int, seed: int = 0
) -> ResumeResult:
    """Train twice, killing the second training repeatedly, and write a certificate of the
    comparison.

    Args:
        recipe: trained with the processes of `lathe pretrain`: one, or several on this machine.
        options: the recipe and its overrides as command-line options.
        data: token data set.
        output: the certificate, JSON.
        kills: number of kills; kinds and moments are drawn from `seed`. Kills after the end of the
            training are omitted.

    Raises:
        UserError: `output` is something else, or `data` is not a token data set.
        StageError: a training failed by itself.
    """
    claim_output_file(output, RESUME_CERTIFICATE, data)
    TokenDataset.open(data)
    planned = plan_kills(seed, kills, recipe.Engine.max_steps, required_shape(recipe).processes)
    with tempfile.TemporaryDirectory(prefix="lathe-certify-") as name:
        whole, resumed, done = Path(name) / "whole", Path(name) / "resumed", list[Kill]()
        command = ["pretrain", *options, "--data", str(data.absolute()), "--output"]
        log.info("training without interruption")
        _train([*command, str(whole)], whole)
        with bar("kills", kills) as progress:
            for plan in planned:
                training = Training([*command, str(resumed)], resumed, _log_path(resumed))
                try:
                    kill = training.kill_at(plan)
                finally:
                    training.end()
                if kill is None:
                    break
                done.append(kill)
                progress.advance(status=f"{plan.kind} at step {kill.step}")
        _train([*command, str(resumed)], resumed)
        result = ResumeResult(
            done, weight_digests(whole), weight_digests(resumed), first_difference(whole, resumed)
        )
    write_certificate(_values(result, recipe, options, data, kills, seed), output)
    return result


def write_certificate(values: Mapping[str, Any], path: Path) -> None:
    """Write a certificate as JSON."""
    with atomic_file(path) as work:
        work.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _train(command: list[str], output: Path) -> None:
    training = Training(command, output, _log_path(output))
    try:
        training.finish()
    finally:
        training.end()


def _log_path(output: Path) -> Path:
    return output.with_suffix(".log")


def _values(
    result: ResumeResult, recipe: Recipe, options: Sequence[str], data: Path, kills: int, seed: int
) -> dict[str, Any]:
    return {
        "certifies": "killed and resumed training produces the same model as uninterrupted "
        "training",
        "passed": result.passed,
        "difference": asdict(result.difference) if result.difference else None,
        "command": [*options, "--data", str(data)],
        "recipe_sha256": digest(recipe.model_dump_json()),
        "steps": recipe.Engine.max_steps,
        "processes": required_shape(recipe).processes,
        "seed": seed,
        "kills_planned": kills,
        "kills": [asdict(kill) for kill in result.kills],
        "uninterrupted": asdict(result.whole),
        "resumed": asdict(result.resumed),
        "versions": {"lathe": __version__, "python": platform.python_version()},
        "machine": platform.platform(),
    }
