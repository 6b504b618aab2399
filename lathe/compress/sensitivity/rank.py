"""Rank the linears of a model in any framework by what INT8 costs, and choose skips."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import scipy  # type: ignore[import-untyped]

from lathe.artifacts.kinds import SENSITIVITY
from lathe.compress.sensitivity.journal import Journal
from lathe.compress.sensitivity.page import sensitivity_page
from lathe.compress.sensitivity.result import (
    PAGE,
    RESULT,
    RULE,
    Distribution,
    LinearScore,
    SensitivityResult,
    choose_skips,
)
from lathe.config.settings import Recipe, SensitivitySettings
from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.evaluate.score import mean_stderr
from lathe.progress import track
from lathe.storage import atomic_folder, claim_output_folder, digest
from lathe.train.batches import EvalBatches, open_data

log = logging.getLogger("lathe")

WORSE = {"loss": 1.0, "accuracy": -1.0, "kl": 1.0}  # the sign of a change for the worse


class AnalyzedModel(Protocol):
    """A model that can be quantized in part, for the analysis.

    Attributes:
        names: its quantizable linears.
        float_already: those that the checkpoint already leaves in float.
        engine: the framework that computes.
    """

    names: Sequence[str]
    float_already: Sequence[str]
    engine: str

    def measure(self, quantized: frozenset[str]) -> list[float]:
        """The metric of every validation batch, with only `quantized` in INT8."""

    def estimates(self) -> dict[str, float]:
        """KL that INT8 in each linear alone adds, nats a token, estimated from gradients."""

    def weights(self) -> dict[str, Distribution]:
        """Statistics of the weights, by the linear's name."""

    def inputs(self) -> dict[str, Distribution]:
        """Statistics of the inputs, by the linear's name."""

    def n_params(self, name: str) -> int:
        """Number of parameters of a linear."""


class Loaded(Protocol):
    """A checkpoint, whose `model` has a `lathe.model.config.GPTConfig` as `config`."""

    @property
    def model(self) -> Any:
        """The model, which has a `config`."""

    @property
    def digest(self) -> str:
        """The checkpoint's digest."""


def run_analysis(
    recipe: Recipe,
    model: Path,
    data: Path,
    output: Path,
    checkpoint: Loaded,
    open_model: Callable[[TokenDataset, Journal], AnalyzedModel],
) -> SensitivityResult:
    """Rank the linears, choose skips, write `output`.

    Findings are kept in `OUTPUT.unfinished.jsonl` until then; after a kill the same call resumes
    from there, with the same result.

    Args:
        checkpoint: the loaded `model`.
        open_model: what needs calibrating recalls it from the journal.

    Raises:
        UserError: `Sensitivity.mode` does not apply to this checkpoint, or there is an unfinished
            analysis of something else.
    """
    claim_output_folder(output, SENSITIVITY, model, data)
    config = checkpoint.model.config
    _require_mode(recipe.Sensitivity, config.quantization is not None, model)
    tokens = open_data(data, recipe, config.vocab_size, config.n_positions)
    journal = Journal(
        output.with_name(f"{output.name}.unfinished.jsonl"),
        {
            "settings": digest(_settings_that_matter(recipe)),
            "model": checkpoint.digest,
            "data": tokens.digest,
        },
    )
    subject = open_model(tokens, journal)
    result = rank(recipe.Sensitivity, checkpoint.digest, subject, journal)
    values = asdict(result)
    with atomic_folder(output, SENSITIVITY) as work:
        text = json.dumps(values, indent=2, allow_nan=False)
        (work / RESULT).write_text(text + "\n", encoding="utf-8")
        (work / PAGE).write_text(sensitivity_page(values), encoding="utf-8")
    journal.close()
    worst = result.linears[0]
    error = f" ± {worst.stderr:.1g}" if worst.stderr is not None else ""
    cost = f"{worst.score:.2g}{error}"
    log.info("most sensitive: %s costs %s; float: %s", worst.name, cost, result.skip)
    return result


def rank(
    settings: SensitivitySettings, model: str, subject: AnalyzedModel, journal: Journal
) -> SensitivityResult:
    """Rank the linears by what the metric or the gradients say, and choose skips."""
    names = subject.names
    estimates = journal.recall("estimates", subject.estimates, dict)
    if settings.mode == "fisher":
        baseline = fmean(journal.recall("baseline", lambda: subject.measure(frozenset()), list))
        scores, errors = estimates, dict.fromkeys(names)
    else:
        baseline, scores, errors = _one_at_a_time(settings, subject, journal)
    weights, inputs = subject.weights(), subject.inputs()
    linears = [
        LinearScore(
            n, scores[n], subject.n_params(n), estimates[n], weights[n], inputs[n], errors[n]
        )
        for n in sorted(names, key=lambda name: -scores[name])
    ]
    chosen, predicted = choose_skips(linears, settings)
    if predicted > settings.budget:
        log.warning(
            "quantization is predicted to cost %.2g, above Sensitivity.budget %.2g, with "
            "Sensitivity.max_skips %d linears in float",
            predicted,
            settings.budget,
            settings.max_skips,
        )
    return SensitivityResult(
        mode=settings.mode,
        metric=settings.metric,
        model=model,
        baseline=baseline,
        linears=linears,
        skip=[*chosen, *subject.float_already],
        rule=RULE,
        budget=settings.budget,
        predicted=predicted,
        rank_correlation=None if settings.mode == "fisher" else _spearman(linears),
        engine=subject.engine,
    )


def _one_at_a_time(
    settings: SensitivitySettings, subject: AnalyzedModel, journal: Journal
) -> tuple[float, dict[str, float], dict[str, float | None]]:
    """The metric of the model in float (mode ptq) or in INT8 (qat), how much worse INT8 in one
    linear makes it, from float or to all of INT8, and the standard error of that."""
    is_qat, worse = settings.mode == "qat", WORSE[settings.metric]
    start: frozenset[str] = frozenset(subject.names if is_qat else ())
    baseline = journal.recall("baseline", lambda: subject.measure(start), list)
    scores: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    for name in track(subject.names, "sensitivity", len(subject.names)):
        changed = start ^ {name}
        values = journal.recall(name, lambda c=changed: subject.measure(c), list)  # type: ignore[misc]
        sign = -worse if is_qat else worse
        costs = sign * (np.array(values) - np.array(baseline))
        mean, error = mean_stderr(costs)
        scores[name] = mean + 0.0  # no -0.0
        errors[name] = None if math.isnan(error) else error
    return fmean(baseline), scores, errors


def validation_batches(recipe: Recipe, data: TokenDataset) -> EvalBatches:
    """The validation batches that the metric is measured on.

    Raises:
        UserError: the validation part cannot fill one sequence.
    """
    size = recipe.Global.micro_batch_size
    batches = EvalBatches(recipe, data, size, recipe.Sensitivity.eval_batches)
    if not len(batches):
        raise UserError(
            f"{data.folder}: the validation part cannot fill one sequence",
            "give validation a larger share of Data.Eval.dataset.split",
        )
    return batches


def _require_mode(settings: SensitivitySettings, is_quantized: bool, model: Path) -> None:
    if settings.mode == "qat" and not is_quantized:
        raise UserError(
            f"{model}: is not quantized, and Sensitivity.mode is qat",
            "quantize it first, or -o Sensitivity.mode=ptq",
        )
    if settings.mode != "qat" and is_quantized:
        raise UserError(
            f"{model}: is already quantized, and Sensitivity.mode is {settings.mode}",
            "analyze its parent checkpoint, or -o Sensitivity.mode=qat",
        )


def _spearman(linears: Sequence[LinearScore]) -> float | None:
    """Spearman's rank correlation; None if all values are equal or there is only one."""
    scores, estimates = [x.score for x in linears], [x.estimate for x in linears]
    if len(set(scores)) < 2 or len(set(estimates)) < 2:
        return None
    return float(scipy.stats.spearmanr(scores, estimates).statistic)


def _settings_that_matter(recipe: Recipe) -> str:
    """The budget and the cap only choose among the findings."""
    return recipe.model_dump_json(
        include={
            "Global": True,
            "Engine": {"max_steps"},
            "Data": True,
            "Compress": {"Quantization"},
            "Sensitivity": {"mode", "metric", "calibration_batches", "eval_batches"},
        }
    )
