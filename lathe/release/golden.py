"""Golden prompts: the answers that a release must reproduce wherever it is served."""

import logging
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from lathe.evaluate.evaluation_folder import read_metrics
from lathe.release.rehearsal import ask, greedy
from lathe_base.artifacts.kinds import read_json
from lathe_base.errors import Code, StageError, UserError
from lathe_base.inputs import first_mistake
from lathe_serving.client import Client

log = logging.getLogger("lathe")

REPORT = "deploy.json"


class GoldenPrompt(BaseModel):
    """A prompt and its greedy tokens, of which the first `clear` must be reproduced: the checkpoint
    prefers them by more than the export's proven tolerance. Later ones may follow a near tie, which
    rounding on another CPU may break differently."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    tokens: tuple[int, ...]
    clear: NonNegativeInt


class Golden(BaseModel):
    """Attributes:
    published: time of the first publication.
    max_tokens: length of every continuation.
    figures: those of the checkpoint's evaluation; empty without one.
    """

    model_config = ConfigDict(extra="forbid")

    published: datetime
    max_tokens: PositiveInt
    prompts: tuple[GoldenPrompt, ...]
    figures: dict[str, float] = {}

    @staticmethod
    def parse(text: str, where: str) -> "Golden":
        """Parse; raises UserError if `publish` did not write this text."""
        try:
            return Golden.model_validate_json(text)
        except ValidationError as error:
            raise UserError(
                f"{where}: broken: {first_mistake(error)}",
                "remove it, and publish the release again",
                Code.MALFORMED,
            ) from error

    def replay(self, client: Client) -> int:
        """Replay every prompt; returns the number of identical continuations.

        Raises:
            StageError: a clear token differs.
        """
        identical = 0
        for golden in self.prompts:
            tokens = tuple(ask(client, golden.prompt, **greedy(self.max_tokens)).tokens)
            identical += tokens == golden.tokens
            clear = golden.tokens[: golden.clear]
            if tokens[: golden.clear] != clear:
                raise StageError(
                    f"the release's answers differ from its checkpoint's: {golden.prompt!r} gives "
                    f"{list(tokens)}, not {list(clear)} ...",
                    Code.NOT_PROVED,
                )
        log.info("golden prompts: %d of %d identical", identical, len(self.prompts))
        return identical


def make_golden(deployed: Path, evaluation: Path | None) -> Golden:
    """Golden prompts from a rehearsal, with the figures of the checkpoint's evaluation.

    Args:
        deployed: output of `lathe deploy`.
        evaluation: output of `lathe evaluate`, of the checkpoint.

    Raises:
        UserError: a folder is of the wrong kind.
    """
    if not (deployed / REPORT).is_file():
        raise UserError(
            f"{deployed}: no {REPORT}", "give the output folder of `lathe deploy`", Code.WRONG_KIND
        )
    try:
        report = read_json(deployed / REPORT, "deploy the model again")
        golden = [
            GoldenPrompt(**{key: sample[key] for key in GoldenPrompt.model_fields})
            for sample in report["samples"]
        ]
        return Golden(
            published=datetime.now(UTC),
            max_tokens=report["max_tokens"],
            prompts=tuple(golden),
            figures=_figures(evaluation) if evaluation else {},
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{deployed}: no {REPORT} of a rehearsal ({type(error).__name__})",
            "give the output folder of `lathe deploy`, or deploy it again",
            Code.WRONG_KIND,
        ) from error


def _figures(evaluation: Path) -> dict[str, float]:
    metrics = read_metrics(evaluation)
    cloze, text = metrics["cloze"] or {}, metrics["text"] or {}
    values = {
        "cloze_accuracy": cloze.get("accuracy"),
        "cloze_stderr": cloze.get("accuracy_stderr"),
        "perplexity": text.get("perplexity"),
        "perplexity_stderr": text.get("perplexity_stderr"),
        "parameters": metrics["model"]["n_params"],
        "bytes": metrics["model"]["bytes"],
    }
    return {name: float(value) for name, value in values.items() if value is not None}
