"""Which linears INT8 hurts, and which to leave in float.

After PaddleSlim's analysis of sensitivity, whose two modes these are; `fisher` is added.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor

from lathe.compress.plan import make_plan, quantizable
from lathe.compress.sensitivity.fisher import estimate_costs
from lathe.compress.sensitivity.journal import Journal
from lathe.compress.sensitivity.measure import WORSE, Measure
from lathe.compress.sensitivity.statistics import (
    Distribution,
    input_distributions,
    weight_distributions,
)
from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.evaluate.score import mean_stderr
from lathe.model import fake_quant
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import HEAD, QuantizationPlan
from lathe.model.gpt import GPT
from lathe.progress import track
from lathe.report.sensitivity import sensitivity_page
from lathe.settings import Recipe, SensitivitySettings
from lathe.storage import atomic_folder, digest, require_replaceable
from lathe.train.batches import EvalBatches, calibration_batches, open_data
from lathe.train.workers import choose_device

log = logging.getLogger("lathe")

RESULT = "sensitivity.json"
PAGE = "sensitivity.html"
RULE = (
    "what single linears cost is taken to add up; the worst stay float, one by one, until what is "
    "left is predicted to cost at most Sensitivity.budget (as costs add up, no smaller choice "
    "does), or Sensitivity.max_skips are float"
)


@dataclass(frozen=True)
class LinearScore:
    """What INT8 in one linear costs.

    Attributes:
        score: in the metric's unit: loss or KL added, nats a token, or accuracy lost, 0 to 1.
        estimate: KL added, nats a token, as the gradients foretell it.
        stderr: of `score`, over the validation batches; None for an estimate or of a single batch.
    """

    name: str
    score: float
    n_params: int
    estimate: float
    weights: Distribution
    inputs: Distribution
    stderr: float | None = None


@dataclass(frozen=True)
class SensitivityResult:
    """Ranking, worst first, and the skips that follow from it; all in the metric's unit.

    Attributes:
        model: digest of the analyzed checkpoint.
        baseline: the metric of the float model; in mode qat of the quantized one.
        skip: the linears to leave in float, with those that the analyzed checkpoint has so.
        predicted: what INT8 costs with `skip` in float.
        rank_correlation: Spearman's, of scores and estimates; None where nothing was measured to
            correlate.
    """

    mode: str
    metric: str
    model: str
    baseline: float
    linears: list[LinearScore]
    skip: list[str]
    rule: str
    budget: float
    predicted: float
    rank_correlation: float | None


def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> SensitivityResult:
    """Rank the linears of a checkpoint and choose skips.

    Writes `sensitivity.json` and a page for people, `sensitivity.html`. What is found is kept in
    `OUTPUT.unfinished.jsonl` until then: the same call after a kill goes on from there, to the same
    result.

    Raises:
        UserError: `Sensitivity.mode` is not for this checkpoint, the validation part cannot fill
            one sequence, or an unfinished analysis of something else is in the way.
    """
    require_replaceable(output, RESULT)
    checkpoint = load_checkpoint(model)
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
    result = rank(recipe, checkpoint, tokens, journal)
    values = asdict(result)
    with atomic_folder(output, RESULT) as work:
        text = json.dumps(values, indent=2, allow_nan=False)
        (work / RESULT).write_text(text + "\n")
        (work / PAGE).write_text(sensitivity_page(values), encoding="utf-8")
    journal.close()
    worst = result.linears[0]
    error = f" ± {worst.stderr:.1g}" if worst.stderr is not None else ""
    cost = f"{worst.score:.2g}{error}"
    log.info("most sensitive: %s costs %s; float: %s", worst.name, cost, result.skip)
    return result


def rank(
    recipe: Recipe, checkpoint: Checkpoint, data: TokenDataset, journal: Journal
) -> SensitivityResult:
    """The analysis itself."""
    settings = recipe.Sensitivity
    validation = EvalBatches(recipe, data, recipe.Global.micro_batch_size, settings.eval_batches)
    if not len(validation):
        raise UserError(
            f"{data.folder}: the validation part cannot fill one sequence",
            "give validation a larger share of Data.Eval.dataset.split",
        )
    device = choose_device(recipe.Global.device)
    batches = calibration_batches(recipe, data)
    calibration = [torch.from_numpy(tokens).to(device) for tokens in batches]
    model = without_quantization(checkpoint.model).to(device).eval()
    plan = checkpoint.model.config.quantization or _calibrated(recipe, model, calibration, journal)
    names = list(plan.activation_scales)

    measure = Measure(settings.metric, validation, model)
    estimates = journal.recall("estimates", lambda: estimate_costs(model, plan, names, calibration))
    if settings.mode == "fisher":
        baseline = fmean(journal.recall("baseline", lambda: measure(model)))
        scores, errors = estimates, dict.fromkeys(names)
    else:
        baseline, scores, errors = _one_at_a_time(measure, model, plan, settings.mode, journal)
    weights = weight_distributions(model, plan, names)
    inputs = input_distributions(model, plan, names, calibration)
    linears = [
        LinearScore(
            n, scores[n], _n_params(model, n), estimates[n], weights[n], inputs[n], errors[n]
        )
        for n in sorted(names, key=lambda name: -scores[name])
    ]
    chosen, predicted = choose_skips(linears, settings)
    if predicted > settings.budget:
        log.warning(
            "INT8 is predicted to cost %.2g, above Sensitivity.budget %.2g, with "
            "Sensitivity.max_skips %d linears in float",
            predicted,
            settings.budget,
            settings.max_skips,
        )
    float_already = [
        n for n in quantizable(model.config, recipe.Compress.Quantization) if n not in names
    ]
    return SensitivityResult(
        mode=settings.mode,
        metric=settings.metric,
        model=checkpoint.digest,
        baseline=baseline,
        linears=linears,
        skip=chosen + float_already,
        rule=RULE,
        budget=settings.budget,
        predicted=predicted,
        rank_correlation=None if settings.mode == "fisher" else _spearman(linears),
    )


def _one_at_a_time(
    measure: Measure, model: GPT, plan: QuantizationPlan, mode: str, journal: Journal
) -> tuple[float, dict[str, float], dict[str, float | None]]:
    """The metric of `model` in float (mode ptq) or in INT8 (qat), how much worse INT8 in one linear
    makes it, from float or to all of INT8, and the standard error of that."""
    everything, worse = frozenset(plan.activation_scales), WORSE[measure.metric]

    def measured(names: Iterable[str]) -> list[float]:
        with fake_quant.inserted(model, _part(plan, names)):
            return measure(model)

    start: frozenset[str] = everything if mode == "qat" else frozenset()
    baseline = journal.recall("baseline", lambda: measured(start))
    scores: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    for name in track(plan.activation_scales, "sensitivity", len(everything)):
        changed = start ^ {name}
        values = journal.recall(name, lambda changed=changed: measured(changed))  # type: ignore[misc]
        sign = -worse if mode == "qat" else worse
        costs = sign * (np.array(values) - np.array(baseline))
        mean, error = mean_stderr(costs)
        scores[name] = mean + 0.0  # no -0.0
        errors[name] = None if math.isnan(error) else error
    return fmean(baseline), scores, errors


def choose_skips(
    ranked: Sequence[LinearScore], settings: SensitivitySettings
) -> tuple[list[str], float]:
    """Apply `RULE` to scores that are sorted worst first: (names to skip, predicted cost).

    A negative score is noise, not a gain, and counts as none.
    """
    costs = [max(linear.score, 0.0) for linear in ranked]
    for n in range(len(ranked) + 1):
        predicted = math.fsum(costs[n:])
        if predicted <= settings.budget or n == settings.max_skips:
            break
    return [linear.name for linear in ranked[:n]], predicted


def without_quantization(model: GPT) -> GPT:
    """A float model of the same weights, in the same memory."""
    weights = model.state_dict()
    with torch.device("meta"):
        bare = GPT(replace(model.config, quantization=None))
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()}, assign=True)
    return bare


def _calibrated(
    recipe: Recipe, model: GPT, batches: Iterable[Tensor], journal: Journal
) -> QuantizationPlan:
    """A plan for all linears of a float model."""
    plan = make_plan(model.config, recipe.Compress.Quantization)

    def find() -> dict[str, float]:
        with fake_quant.inserted(model, plan):
            return fake_quant.calibrate(model, batches)

    scales = journal.recall("scales", find)
    return replace(plan, activation_scales={name: scales[name] for name in plan.activation_scales})


def _part(plan: QuantizationPlan, names: Iterable[str]) -> QuantizationPlan:
    """The plan with `names` alone in INT8."""
    scales = {n: scale for n, scale in plan.activation_scales.items() if n in frozenset(names)}
    return replace(plan, quantize_embedding=HEAD in scales, activation_scales=scales)


def _spearman(linears: Sequence[LinearScore]) -> float | None:
    """None where all are the same, or there is but one."""
    scores, estimates = [x.score for x in linears], [x.estimate for x in linears]
    if len(set(scores)) < 2 or len(set(estimates)) < 2:
        return None
    return float(spearmanr(scores, estimates).statistic)


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


def _n_params(model: GPT, name: str) -> int:
    if name == HEAD:
        return model.wte.weight.numel()
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
