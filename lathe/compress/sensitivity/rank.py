"""Rank the linears of a model in any framework by the cost of quantizing them, and choose their
formats."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import scipy  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from lathe.compress.plan import choose
from lathe.compress.sensitivity.page import sensitivity_page
from lathe.compress.sensitivity.result import (
    PAGE,
    RESULT,
    Distribution,
    LinearScore,
    SensitivityResult,
)
from lathe.data.tokens import TokenDataset
from lathe.evaluate.intervals import mean_stderr
from lathe.train.batches import EvalBatches, open_data
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import SENSITIVITY
from lathe_base.config.settings import Recipe, SensitivitySettings
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, UserError
from lathe_base.progress import track
from lathe_base.storage import atomic_folder, claim_output_folder, digest

log = logging.getLogger("lathe")

Costs = dict[str, tuple[float, float | None]]
"""Linear -> (cost in the metric's unit, standard error)."""

WORSE = {"loss": 1.0, "accuracy": -1.0, "kl": 1.0}  # the sign of a change for the worse


class AnalyzedModel(Protocol):
    """A model that can be quantized in part, for the analysis.

    Attributes:
        names: its quantizable linears.
        float_already: those that are already in float in the checkpoint.
        forms: the formats to measure, the narrowest first; for a quantized model a single one,
            which stands for those of its plan.
        group_size: of formats with groups.
        engine: the framework that computes.
    """

    names: Sequence[str]
    float_already: Sequence[str]
    forms: Sequence[Format]
    group_size: int
    engine: str

    def measure(self, formats: Mapping[str, Format]) -> list[float]:
        """The metric of every validation batch, with only these linears quantized."""

    def estimates(self) -> dict[Format, dict[str, float]]:
        """Estimates of the KL added by quantizing each linear alone, nats per token, by format and
        name."""

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
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

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
    """Rank the linears, choose their formats, write `output`.

    Measurements are kept in `OUTPUT.unfinished.jsonl` until then; after a kill the same call
    resumes from there, with the same result.

    Args:
        checkpoint: the loaded `model`.
        open_model: opens the model; calibration results come from the journal if it has them.

    Raises:
        UserError: `Sensitivity.mode` does not apply to this checkpoint, or there is an unfinished
            analysis of something else.
    """
    claim_output_folder(output, SENSITIVITY, model, data)
    # qat analyzes a quantized checkpoint, the other modes a float one.
    config = checkpoint.model.config
    is_qat, is_quantized = recipe.Sensitivity.mode == "qat", config.quantization is not None
    if is_qat and not is_quantized:
        raise UserError(
            f"{model}: is not quantized, but Sensitivity.mode is qat",
            "quantize it first, or -o Sensitivity.mode=ptq",
            Code.WRONG_KIND,
        )
    if is_quantized and not is_qat:
        raise UserError(
            f"{model}: is already quantized, but Sensitivity.mode is {recipe.Sensitivity.mode}",
            "analyze its parent checkpoint, or -o Sensitivity.mode=qat",
            Code.WRONG_KIND,
        )
    tokens = open_data(data, recipe, config, checkpoint.tokenizer)
    # Of the settings those that affect measurements: budget and cap only affect the choice.
    settings = recipe.model_dump_json(
        include={
            "Global": True,
            "Engine": {"max_steps"},
            "Data": True,
            "Compress": {"Quantization"},
            "Sensitivity": {"mode", "metric", "calibration_batches", "eval_batches"},
            "Gate": {"max_perplexity_increase"},
        }
    )
    journal = Journal(
        output.with_name(f"{output.name}.unfinished.jsonl"),
        {
            "settings": digest(settings),
            "model": checkpoint.digest,
            "data": tokens.digest,
        },
    )
    subject = open_model(tokens, journal)
    result = rank(recipe.Sensitivity, checkpoint.digest, subject, journal)
    values = asdict(result)
    # The journal goes when the folder is there: a kill between the two costs no measurement.
    with atomic_folder(output, SENSITIVITY) as work:
        text = json.dumps(values, indent=2, allow_nan=False)
        (work / RESULT).write_text(text + "\n", encoding="utf-8")
        (work / PAGE).write_text(sensitivity_page(values), encoding="utf-8")
    journal.close()
    worst = result.linears[0]
    error = f" ± {worst.stderr:.1g}" if worst.stderr is not None else ""
    cost = f"{worst.score:.2g}{error}"
    log.info("most sensitive: %s costs %s; float: %s", worst.name, cost, result.skip)
    if len(subject.forms) > 1:
        log.info("formats: %s", dict(Counter(result.formats.values())))
    return result


def rank(
    settings: SensitivitySettings, model: str, subject: AnalyzedModel, journal: Journal
) -> SensitivityResult:
    """Rank the linears by the metric or by gradients, and choose their formats."""
    names, forms = subject.names, subject.forms
    estimates = journal.recall("estimates", subject.estimates, dict)
    scores: dict[Format, Costs] = {}
    is_qat = settings.mode == "qat"
    if settings.mode == "fisher":
        baseline = fmean(journal.recall("baseline", lambda: subject.measure({}), list))
        for fmt in forms:
            # Scaled to the measured cost of all linears in the format; not for the metric `loss`,
            # whose differences are mostly noise.
            factor, estimated = 1.0, sum(estimates[fmt].values())
            if settings.metric == "kl" and estimated:
                every = dict.fromkeys(names, fmt)
                key = f"all in {fmt}"
                measured = journal.recall(key, lambda every=every: subject.measure(every), list)  # type: ignore[misc]
                factor = fmean(measured) / estimated
            scores[fmt] = {name: (factor * estimates[fmt][name], None) for name in names}
    else:
        start = dict.fromkeys(names, forms[0]) if is_qat else {}
        values = journal.recall("baseline", lambda: subject.measure(start), list)
        baseline = fmean(values)
        for fmt in forms:
            scores[fmt] = _one_at_a_time(settings, subject, journal, start, values, fmt)
    weights, inputs = subject.weights(), subject.inputs()
    linears = [
        LinearScore(
            name,
            score,
            subject.n_params(name),
            estimates[forms[0]][name],
            weights[name],
            inputs[name],
            error,
            {fmt: scores[fmt][name][0] for fmt in forms} if len(forms) > 1 else {},
        )
        for name, (score, error) in sorted(scores[forms[0]].items(), key=lambda item: -item[1][0])
    ]
    choice = choose(linears, forms, settings, subject.group_size)
    return SensitivityResult(
        mode=settings.mode,
        metric=settings.metric,
        model=model,
        baseline=baseline,
        linears=linears,
        skip=[*choice.skip, *subject.float_already],
        formats={} if is_qat else choice.quantized,
        rule=choice.rule,
        budget=settings.budget if settings.bits_per_weight is None else None,
        predicted=choice.predicted,
        rank_correlation=None if settings.mode == "fisher" else _spearman(linears),
        engine=subject.engine,
    )


def _one_at_a_time(
    settings: SensitivitySettings,
    subject: AnalyzedModel,
    journal: Journal,
    start: Mapping[str, Format],
    baseline: Sequence[float],
    fmt: Format,
) -> Costs:
    """Change in the metric, with its standard error, for each linear: quantized alone to `fmt`
    (mode ptq), or compared with all others quantized (qat).

    Args:
        start: the formats with the metric `baseline`.
    """
    is_qat = settings.mode == "qat"
    sign = WORSE[settings.metric] * (-1 if is_qat else 1)
    costs: Costs = {}
    for name in track(subject.names, f"sensitivity to {fmt}", len(subject.names)):
        without = {other: start_format for other, start_format in start.items() if other != name}
        # From the float model one linear is quantized; from the quantized model one is not.
        changed = without if is_qat else {name: fmt}
        key = f"{name} {fmt}"
        values = journal.recall(key, lambda c=changed: subject.measure(c), list)  # type: ignore[misc]
        mean, error = mean_stderr(sign * (np.array(values) - np.array(baseline)))
        costs[name] = mean + 0.0, None if math.isnan(error) else error  # no -0.0
    return costs


def validation_batches(recipe: Recipe, data: TokenDataset) -> EvalBatches:
    """The validation batches on which the metric is measured.

    Raises:
        UserError: validation data is shorter than one sequence.
    """
    size = recipe.Global.micro_batch_size
    count = recipe.Sensitivity.eval_batches
    batches = EvalBatches(recipe, data, size, count, packs=True)  # else a mean over padding
    if not len(batches):
        raise UserError(
            f"{data.folder}: validation data is shorter than one sequence",
            "give validation a larger share of Data.Eval.dataset.split",
            Code.TOO_LITTLE_DATA,
        )
    return batches


def _spearman(linears: Sequence[LinearScore]) -> float | None:
    """Spearman's rank correlation; None if all values are equal or there is only one."""
    scores, estimates = [x.score for x in linears], [x.estimate for x in linears]
    if len(set(scores)) < 2 or len(set(estimates)) < 2:
        return None
    return float(scipy.stats.spearmanr(scores, estimates).statistic)
