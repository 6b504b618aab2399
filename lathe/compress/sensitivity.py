"""Which linears INT8 hurts: quantize one at a time and measure the loss (PaddleSlim's PTQ mode)."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lathe.compress.quantize import make_plan, quantizable
from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import QuantizationPlan
from lathe.model.gpt import GPT
from lathe.progress import track
from lathe.settings import Recipe, SensitivitySettings
from lathe.storage import atomic_folder
from lathe.train.batches import EvalBatches, calibration_batches, open_data
from lathe.train.loss import next_token_loss

log = logging.getLogger("lathe")

RULE = (
    "the losses that single linears cost are taken to add up; the worst stay float, one by one, "
    "until what is left is predicted to cost at most Sensitivity.loss_budget, or "
    "Sensitivity.max_skips are float"
)


@dataclass(frozen=True)
class LinearScore:
    """What INT8 in this linear alone costs: loss minus float loss, nats a token."""

    name: str
    score: float
    n_params: int


@dataclass(frozen=True)
class SensitivityResult:
    """Ranking, worst first, and the skips that follow from it; losses in nats a token."""

    metric: str
    baseline: float
    linears: list[LinearScore]
    skip: list[str]
    rule: str
    budget: float
    predicted: float  # loss added with `skip` left in float


def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> SensitivityResult:
    """Rank the linears of a float checkpoint and choose skips; writes `sensitivity.json`.

    Raises:
        UserError: `model` is quantized, or the validation part cannot fill one sequence.
    """
    checkpoint = load_checkpoint(model)
    if checkpoint.model.config.quantization is not None:
        raise UserError(f"{model}: is already quantized", "analyze its parent checkpoint")
    config = checkpoint.model.config
    tokens = open_data(data, recipe, config.vocab_size, config.n_positions)
    with atomic_folder(output, "sensitivity.json") as work:
        result = rank(recipe, checkpoint.model, tokens)
        (work / "sensitivity.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    worst = result.linears[0]
    log.info("most sensitive: %s costs %.4f nats; float: %s", worst.name, worst.score, result.skip)
    return result


@torch.no_grad()
def rank(recipe: Recipe, model: GPT, data: TokenDataset) -> SensitivityResult:
    """The analysis itself; `model` is as before afterwards."""
    settings, quantization = recipe.Sensitivity, recipe.Compress.Quantization
    micro = recipe.Global.micro_batch_size
    validation = EvalBatches(recipe, data, micro, settings.eval_batches)
    if not len(validation):
        raise UserError(
            f"{data.folder}: the validation part cannot fill one sequence",
            "give validation a larger share of Data.Eval.dataset.split",
        )

    def loss() -> float:
        sums = [
            (float(next_token_loss(model, tokens)) * len(tokens), len(tokens))
            for tokens in (validation[i] for i in range(len(validation)))
        ]
        return sum(s for s, _ in sums) / sum(n for _, n in sums)

    model.eval()
    plan = make_plan(model.config, quantization)
    with fake_quant.inserted(model, plan):
        scales = fake_quant.calibrate(model, calibration_batches(recipe, data))
    baseline, scores = loss(), []
    for name in track(quantizable(model.config, quantization), "sensitivity"):
        alone = QuantizationPlan(
            weight_quantize_type=plan.weight_quantize_type,
            quantize_embedding=name == fake_quant.HEAD,
            activation_scales={name: scales[name]},
        )
        with fake_quant.inserted(model, alone):
            scores.append(LinearScore(name, loss() - baseline, _n_params(model, name)))
    scores.sort(key=lambda linear: -linear.score)
    skip, predicted = choose_skips(scores, settings)
    budget = settings.loss_budget
    return SensitivityResult("loss", baseline, scores, skip, RULE, budget, predicted)


def choose_skips(
    ranked: list[LinearScore], settings: SensitivitySettings
) -> tuple[list[str], float]:
    """Apply `RULE` to scores that are sorted worst first: (names to skip, predicted added loss).

    A negative score is noise, not a gain, and counts as none.
    """
    predicted = sum(max(linear.score, 0.0) for linear in ranked)
    skip: list[str] = []
    for linear in ranked:
        if predicted <= settings.loss_budget or len(skip) == settings.max_skips:
            break
        skip.append(linear.name)
        predicted -= max(linear.score, 0.0)
    return skip, predicted


def _n_params(model: GPT, name: str) -> int:
    if name == fake_quant.HEAD:
        return model.wte.weight.numel()
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
