"""Search for the least pruned INT8 model that meets a target within a budget of quality."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lathe import backends
from lathe.artifacts.kinds import EXPORT as EXPORTED
from lathe.artifacts.kinds import SENSITIVITY, read_as
from lathe.compress.enabled import require_enabled
from lathe.config.settings import Recipe
from lathe.data.tokens import TokenDataset
from lathe.evaluate.lambada import check_cloze
from lathe.evaluate.results import METRICS
from lathe.model.folder import checkpoint_digest
from lathe.search.goal import Goal
from lathe.search.judge import evaluate_trial, trial_name, verdict_of
from lathe.search.ratios import next_ratios
from lathe.search.result import conclude
from lathe.search.trial import SearchResult, Trial
from lathe.storage import atomic_file, digest, sha256
from lathe.train.result import FREE, Identity, begin, claimed

log = logging.getLogger("lathe")

Perform = Callable[[str, Recipe, Callable[[], object], Sequence[object]], object]
"""Called with a training verb, the recipe of it, the stage and its command line's arguments."""

METADATA = "trial.json"
PARTS = EVALUATION, EXPORT = "evaluation", "onnx"
JUDGED = ("Sensitivity", "Offline_Eval", "Export")
"""Groups of settings that a training run may change, and a search may not."""


def compress(
    goal: Goal,
    recipes: tuple[Recipe, Recipe, Recipe],
    model: Path,
    data: Path,
    output: Path,
    trials: int = 4,
    cloze: Path | None = None,
    run: Perform | None = None,
) -> SearchResult:
    """Try INT8 alone, then pruning ratios that converge on the target; write `compress.json` and
    `compress.html`, a picture of all trials.

    Every trial prunes, finetunes, ranks linears, quantizes, exports and evaluates, in a folder of
    its own under `output`; a killed search resumes in the same trial and stage.

    Args:
        recipes: for evaluation and export, for pruning, and for quantization.
        trials: maximum number of trials.
        run: runs a training stage; it may do so on several processes. In this one unless given.

    Raises:
        UserError: `output` belongs to a search of other settings, or a recipe disables its stage;
            see also the stages.
    """
    require_enabled("Prune", recipes[1].Compress.Prune.enable)
    require_enabled("Quantization", recipes[2].Compress.Quantization.enable)
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
        done: list[Trial] = []
        for ratio in next_ratios(self.goal, done):
            done.append(self.attempt(ratio))
            log.info("%s", done[-1])
            if len(done) == trials:
                break
        return conclude(self.goal, self.dense / EVALUATION, done, self.output)

    def attempt(self, ratio: float) -> Trial:
        """The trial of a ratio; one that an earlier search made is judged by this one's budget."""
        folder = self.output / trial_name(ratio)
        if (folder / METADATA).is_file():
            known = read_as(folder / METADATA, Trial, "delete the file: the trial is judged again")
            evaluations = self.dense / EVALUATION, folder / EVALUATION
            return replace(known, verdict=verdict_of(self.base, self.goal, *evaluations))
        log.info("trial %s", folder.name)
        source = self.prune(ratio, folder / "pruned") if ratio else self.model
        self.measure(self.quantize(source, folder), folder)
        folders = (f / part for f in (self.dense, folder) for part in PARTS)
        trial = evaluate_trial(self.base, self.goal, ratio, *folders)
        with atomic_file(folder / METADATA) as work:
            work.write_text(json.dumps(asdict(trial), indent=2) + "\n", encoding="utf-8")
        return trial

    def prune(self, ratio: float, output: Path) -> Path:
        recipe = _with_ratio(self.pruning, ratio)
        self.perform(
            "prune",
            recipe,
            lambda: backends.of(recipe).prune(recipe, self.model, self.data, output),
            [self.model, "--data", self.data, "--output", output],
        )
        return output

    def quantize(self, source: Path, folder: Path) -> Path:
        """Rank the linears of `source`, and make it INT8 by the ranking."""
        recipe, backend = self.quantization, backends.of(self.quantization)
        ranked, int8 = folder / "sensitivity", folder / "int8"
        if not (ranked / SENSITIVITY.metadata_file).is_file():
            backend.analyze(recipe, source, self.data, ranked)
        self.perform(
            "quantize",
            recipe,
            lambda: backend.quantize(recipe, source, self.data, int8, ranked),
            [source, "--data", self.data, "--sensitivity", ranked, "--output", int8],
        )
        return int8

    def measure(self, model: Path, folder: Path) -> None:
        """Export and evaluate a model into `folder`, as far as that is not done."""
        backend = backends.of(self.base)
        if not (folder / EXPORT / EXPORTED.metadata_file).is_file():
            backend.export(self.base, model, self.data, folder / EXPORT)
        if not (folder / EVALUATION / METRICS).is_file():
            backend.evaluate(self.base, model, folder / EVALUATION, self.data, self.cloze)


def _with_ratio(recipe: Recipe, ratio: float) -> Recipe:
    settings = recipe.Compress.Prune.model_copy(update={"ratio": ratio})
    compression = recipe.Compress.model_copy(update={"Prune": settings})
    return recipe.model_copy(update={"Compress": compression})
