"""Search for the best model that meets a target, with one budget for heads, channels, layers and
formats: predict, solve, measure, correct the prediction, and train."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lathe import backends
from lathe.compress.feasible import require_enabled
from lathe.data.tokens import TokenDataset
from lathe.evaluate.evaluation_folder import METRICS
from lathe.evaluate.tasks import CLOZE
from lathe.model.folder import CheckpointFolder, open_folder
from lathe.search.design import Design, Goal, Proposal
from lathe.search.prices import write_costs, write_prices
from lathe.search.proposals import write_designs
from lathe.search.result import (
    SearchResult,
    Trial,
    conclude,
    evaluate_trial,
    judge_candidate,
)
from lathe.train.result import FREE, Identity, begin, claimed
from lathe_base.artifacts.kinds import EXPORT as EXPORTED
from lathe_base.artifacts.kinds import read_as
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.storage import atomic_file, digest, sha256

log = logging.getLogger("lathe")

Perform = Callable[[str, Recipe, Callable[[], object], Sequence[object]], object]
"""Called with a training verb, its recipe, the stage and its command-line arguments."""

METADATA, QUANTIZED = "trial.json", "quantized"
PARTS = EVALUATION, EXPORT = "evaluation", "onnx"
JUDGED = ("Sensitivity", "Offline_Eval", "Export")
"""Groups of settings that may change between training runs, but not within a search."""


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
    """Find and train the best design for the target; write `compress.json` and `compress.html`.

    The quality cost of every part of the model is estimated from gradients, and its price in the
    target is measured on this machine. The designs that `propose` finds are pruned, finetuned,
    quantized, trained, exported and evaluated. A killed search resumes in the same trial and stage.
    The pipeline `compress` takes the same steps.

    Args:
        recipes: for evaluation and export, for pruning, and for quantization.
        trials: maximum number of designs to train.
        run: runs a training stage, possibly in several processes; default: in this process.

    Raises:
        UserError: `output` belongs to a search with other settings, the recipe disables
            quantization, or the backend does not support the search; see also the stages.
    """
    require_enabled("Quantization", recipes[2].Compress.Quantization.enable)
    backends.of(recipes[1]).check_support("compress", recipes[1], has_gpu=False)
    dense = open_folder(model)
    if dense.config.quantization is not None:
        raise UserError(
            f"{dense.path}: is quantized", "start from its dense parent", Code.WRONG_KIND
        )
    if cloze:
        CLOZE.check(cloze)  # before the work
    free = {group: what for group, what in FREE.items() if group not in JUDGED}
    identity: Identity = {
        "model": dense.digest,
        "data": TokenDataset.open(data).digest,
        "settings": digest("".join(r.model_dump_json(exclude=free) for r in recipes)),
        "cloze": sha256(cloze) if cloze else "",
    }
    # Of the command line it starts workers; here, and in tests, the stage runs in this process.
    perform = run or (lambda verb, recipe, stage, arguments: stage())
    search = _Search(goal, *recipes, dense, data, output, cloze, perform)
    # The folder is one search's: a resumed one must have the same model, data and settings.
    with claimed(output, identity, model, data, cloze):
        begin(output, identity)
        return search.run(trials)


@dataclass(frozen=True)
class _Search:
    """A search in a claimed folder; `base` is the recipe for evaluation and export."""

    goal: Goal
    base: Recipe
    pruning: Recipe
    quantization: Recipe
    parent: CheckpointFolder
    data: Path
    output: Path
    cloze: Path | None
    perform: Perform

    @property
    def dense(self) -> Path:
        """Evaluation and export of the dense model."""
        return self.output / "dense"

    def run(self, trials: int) -> SearchResult:
        self.measure(self.parent.path, self.dense)
        measured = self.dense / EVALUATION
        # The dense model against itself: raises now if the budget is not measured at all.
        judge_candidate(self.base, self.goal, measured, measured)
        done = []
        for proposal in self.proposals(trials):
            done.append(self.attempt(proposal))
            log.info("%s", done[-1])
        return conclude(self.goal, self.base.Gate, measured, done, self.output)

    def proposals(self, trials: int) -> list[Proposal]:
        """The designs to train; results from before a kill are reused."""
        recipes = self.base, self.pruning, self.quantization
        costs, prices = self.output / "costs.json", self.output / "prices.json"
        dense, designs = self.dense / EXPORT, self.output / "designs.json"
        if not costs.is_file():
            write_costs(self.quantization, self.parent, self.data, costs)
        if not prices.is_file():
            write_prices(self.base, self.quantization, self.parent, costs, dense, prices)
        inputs = self.parent, dense, costs, prices
        return write_designs(self.goal, recipes, *inputs, trials, designs)

    def attempt(self, proposal: Proposal) -> Trial:
        """The trial of a design; an earlier search's trial is tested against this search's
        budget."""
        # The metadata is written last, so that a trial with it is complete.
        design, dense = proposal.design, [self.dense / part for part in PARTS]
        folder = self.output / design.name
        if (folder / METADATA).is_file():
            known = read_as(
                folder / METADATA, Trial, "delete the file: the trial is then evaluated again"
            )
            # The budget may be another one than that of the search that trained it.
            verdict = judge_candidate(self.base, self.goal, dense[0], folder / EVALUATION)
            return replace(known, verdict=verdict, **vars(proposal))
        log.info("trial %s: heads %s, FFN widths %s", design.name, design.heads, design.channels)
        is_pruned = design.prunes(self.parent.config)
        pruned = self.prune(design, folder / "pruned") if is_pruned else self.parent.path
        self.measure(self.quantize(design, pruned, folder / QUANTIZED), folder)
        part_paths = [folder / part for part in PARTS]
        trial = evaluate_trial(self.base, self.goal, proposal, *part_paths, *dense)
        with atomic_file(folder / METADATA) as work:
            work.write_text(json.dumps(asdict(trial), indent=2) + "\n", encoding="utf-8")
        return trial

    def prune(self, design: Design, output: Path) -> Path:
        recipe = design.pruning(self.pruning)
        self.perform(
            "prune",
            recipe,
            lambda: backends.of(recipe).prune(recipe, self.parent.path, self.data, output),
            [self.parent.path, "--data", self.data, "--output", output],
        )
        return output

    def quantize(self, design: Design, source: Path, output: Path) -> Path:
        recipe = design.quantization(self.quantization, self.parent.config.architecture)
        self.perform(
            "quantize",
            recipe,
            lambda: backends.of(recipe).quantize(recipe, source, self.data, output),
            [source, "--data", self.data, "--output", output],
        )
        return output

    def measure(self, model: Path, folder: Path) -> None:
        """Export and evaluate a model into `folder`, unless already done."""
        backend = backends.of(self.base)
        if not (folder / EXPORT / EXPORTED.metadata_file).is_file():
            backend.export(self.base, model, self.data, folder / EXPORT)
        if not (folder / EVALUATION / METRICS).is_file():
            backend.evaluate(self.base, model, folder / EVALUATION, self.data, self.cloze)
