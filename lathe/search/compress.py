"""Search for the best model that meets a target, with one budget for heads, channels, layers and
formats: predict, solve, train, measure, and correct the prediction."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lathe import backends
from lathe.artifacts.kinds import EXPORT as EXPORTED
from lathe.artifacts.kinds import read_as
from lathe.compress.activation import with_activation_scales
from lathe.compress.enabled import require_enabled
from lathe.compress.plan import all_int8, formats, named_formats, quantizable
from lathe.compress.sensitivity.journal import Journal
from lathe.config.settings import QuantizationSettings, Recipe
from lathe.data.tokens import TokenDataset
from lathe.errors import StageError, UserError
from lathe.evaluate.lambada import check_cloze
from lathe.evaluate.results import METRICS
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import read_config
from lathe.model.folder import checkpoint_digest
from lathe.search.costs import Costs, estimate
from lathe.search.design import Design
from lathe.search.goal import Goal
from lathe.search.judge import evaluate_trial, verdict_of
from lathe.search.prices import Prices, measure_prices
from lathe.search.program import Problem
from lathe.search.result import conclude
from lathe.search.trial import SearchResult, Trial
from lathe.storage import atomic_file, digest, sha256
from lathe.train.batches import calibration_batches
from lathe.train.result import FREE, Identity, begin, claimed

log = logging.getLogger("lathe")

Perform = Callable[[str, Recipe, Callable[[], object], Sequence[object]], object]
"""Called with a training verb, the recipe of it, the stage and its command line's arguments."""

METADATA, QUANTIZED = "trial.json", "quantized"
CLOSE = 0.97  # of the target: a trial this near to it is not corrected
PARTS = EVALUATION, EXPORT = "evaluation", "onnx"
JUDGED = ("Sensitivity", "Offline_Eval", "Export")
"""Groups of settings that a training run may change, and a search may not."""


def compress(
    goal: Goal,
    recipes: tuple[Recipe, Recipe, Recipe],
    model: Path,
    data: Path,
    output: Path,
    trials: int = 2,
    cloze: Path | None = None,
    run: Perform | None = None,
) -> SearchResult:
    """Make the model of the best design for the target; write `compress.json` and `compress.html`.

    What every part of the model costs in quality is estimated from gradients, and what it takes of
    the target is measured on this machine. The design is pruned, finetuned, quantized, trained,
    exported and evaluated. Where it misses the target, or leaves much of it, the prices are scaled
    by what was measured, and the next design is tried. A killed search resumes in the same trial
    and stage.

    Args:
        recipes: for evaluation and export, for pruning, and for quantization.
        trials: maximum number of trials.
        run: runs a training stage; it may do so on several processes. In this one unless given.

    Raises:
        UserError: `output` belongs to a search of other settings, or the recipe disables
            quantization, or the backend does not support this; see also the stages.
    """
    require_enabled("Quantization", recipes[2].Compress.Quantization.enable)
    backends.of(recipes[1]).check_support("compress", recipes[1], has_gpu=False)
    if read_config(model).quantization is not None:
        raise UserError(f"{model}: is quantized", "start from its dense parent")
    if cloze:
        check_cloze(cloze)  # before the work
    free = {group: what for group, what in FREE.items() if group not in JUDGED}
    identity: Identity = {
        "model": checkpoint_digest(model),
        "data": TokenDataset.open(data).digest,
        "settings": digest("".join(r.model_dump_json(exclude=free) for r in recipes)),
        "cloze": sha256(cloze) if cloze else "",
    }
    perform = run or (lambda verb, recipe, stage, arguments: stage())
    search = _Search(goal, *recipes, model, data, output, cloze, perform)
    with claimed(output, identity, model, data, cloze):
        begin(output, identity)
        return search.run(trials)


@dataclass(frozen=True)
class _Search:
    """A search in a folder that is claimed; `base` is the recipe that evaluates and exports."""

    goal: Goal
    base: Recipe
    pruning: Recipe
    quantization: Recipe
    model: Path
    data: Path
    output: Path
    cloze: Path | None
    perform: Perform

    @property
    def dense(self) -> Path:
        """Evaluation and export of the dense model."""
        return self.output / "dense"

    def run(self, trials: int) -> SearchResult:
        self.measure(self.model, self.dense)
        problem, done, scale = self.problem(), list[Trial](), 1.0
        while len(done) < trials:
            design = problem.solve(self.goal.at_most / scale)
            if design is None and not done:
                raise StageError(self.impossible(problem))
            if design is None or design in [trial.design for trial in done]:
                break
            price = problem.price(design)
            trial = self.attempt(design, price * scale, problem.cost(design))
            log.info("%s", trial)
            done.append(trial)
            if CLOSE * self.goal.at_most <= trial.reached(self.goal) <= self.goal.at_most:
                break
            scale = trial.reached(self.goal) / price
        return conclude(self.goal, self.dense / EVALUATION, done, self.output)

    def problem(self) -> Problem:
        """The designs to choose from; what was found out before a kill is recalled."""
        checkpoint, tokens = load_checkpoint(self.model), TokenDataset.open(self.data)
        config, settings = checkpoint.model.config, self.quantization.Compress.Quantization
        journal = Journal(self.output / "findings.jsonl", {"model": checkpoint.digest})
        costs = journal.recall(
            "costs",
            lambda: asdict(estimate(self.quantization, checkpoint, tokens, journal)),
            dict,
        )
        prices = journal.recall(
            "prices",
            lambda: measure_prices(
                checkpoint, self.with_activation_scales(checkpoint, tokens), self.base.Export
            ),
            dict,
        )
        given = named_formats(config, settings, None)
        return Problem(
            config,
            Costs(**costs),
            Prices(prices[self.goal.target]),
            {
                name: [given[name]] if name in given else formats(settings)
                for name in quantizable(config, settings)
            },
            settings.group_size,
            self.pruning.Compress.Prune.channel_multiple,
            prunes=self.pruning.Compress.Prune.enable is not False,
        )

    def with_activation_scales(
        self, checkpoint: Checkpoint, tokens: TokenDataset
    ) -> QuantizationSettings:
        """The settings of quantization, with `auto` scales of activations decided."""
        parts = calibration_batches(self.quantization, tokens)
        settings = self.quantization.Compress.Quantization
        return with_activation_scales(
            self.quantization,
            checkpoint.model,
            [torch.from_numpy(part) for part in parts],
            all_int8(checkpoint.model.config, settings),
        )

    def impossible(self, problem: Problem) -> str:
        """Why there is no design."""
        least = problem.cheapest()
        return (
            f"no design reaches {self.goal.target} {self.goal.at_most:g}: the smallest is "
            f"predicted to have {problem.price(least):.3f}. Allow more, or more formats "
            "(Compress.Quantization.weight_bits=4, quantize_embedding=True)"
        )

    def attempt(self, design: Design, predicted: float, cost: float) -> Trial:
        """The trial of a design; one that an earlier search made is judged by this one's budget."""
        folder = self.output / design.name
        if (folder / METADATA).is_file():
            known = read_as(folder / METADATA, Trial, "delete the file: the trial is judged again")
            evaluations = self.dense / EVALUATION, folder / EVALUATION
            verdict = verdict_of(self.base, self.goal, *evaluations)
            return replace(known, verdict=verdict, design=design, predicted=predicted, cost=cost)
        log.info("trial %s: heads %s, FFN widths %s", design.name, design.heads, design.channels)
        config = read_config(self.model)
        is_pruned = (design.heads, design.channels) != (config.n_kv_head, config.n_inner)
        pruned = self.prune(design, folder / "pruned") if is_pruned else self.model
        self.measure(self.quantize(design, pruned, folder / QUANTIZED), folder)
        folders = (f / part for f in (self.dense, folder) for part in PARTS)
        trial = evaluate_trial(self.base, self.goal, design.name, *folders)
        trial = replace(trial, design=design, predicted=predicted, cost=cost)
        with atomic_file(folder / METADATA) as work:
            work.write_text(json.dumps(asdict(trial), indent=2) + "\n", encoding="utf-8")
        return trial

    def prune(self, design: Design, output: Path) -> Path:
        recipe = design.pruning(self.pruning)
        self.perform(
            "prune",
            recipe,
            lambda: backends.of(recipe).prune(recipe, self.model, self.data, output),
            [self.model, "--data", self.data, "--output", output],
        )
        return output

    def quantize(self, design: Design, source: Path, output: Path) -> Path:
        family = read_config(source).architecture
        recipe = design.quantization(self.quantization, family)
        self.perform(
            "quantize",
            recipe,
            lambda: backends.of(recipe).quantize(recipe, source, self.data, output),
            [source, "--data", self.data, "--output", output],
        )
        return output

    def measure(self, model: Path, folder: Path) -> None:
        """Export and evaluate a model into `folder`, as far as that is not done."""
        backend = backends.of(self.base)
        if not (folder / EXPORT / EXPORTED.metadata_file).is_file():
            backend.export(self.base, model, self.data, folder / EXPORT)
        if not (folder / EVALUATION / METRICS).is_file():
            backend.evaluate(self.base, model, folder / EVALUATION, self.data, self.cloze)
