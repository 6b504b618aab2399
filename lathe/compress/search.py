"""The closed loop: how much to prune so that an INT8 model meets a target and is still good."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from tokenizers import Tokenizer, models

from lathe.artifacts import EXPORT as EXPORTED
from lathe.artifacts import PAGE as HTML
from lathe.artifacts import SEARCH, SENSITIVITY, read_as
from lathe.compress.enabled import require_enabled
from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.stage import analyze
from lathe.compress.trial import Budget, Goal, SearchResult, Target, Trial
from lathe.data.tokens import TokenDataset
from lathe.errors import StageError, UserError
from lathe.evaluate.gate import gate
from lathe.evaluate.lambada import read_cloze
from lathe.evaluate.latency import measure
from lathe.evaluate.results import METRICS, read_metrics
from lathe.evaluate.stage import evaluate
from lathe.export.stage import export
from lathe.model.config import read_config
from lathe.model.folder import checkpoint_digest, read_marker, resolve
from lathe.report.pareto import pareto_page
from lathe.settings import Recipe
from lathe.storage import atomic_file, claim_file, digest, sha256
from lathe.train.result import FREE, Identity, begin, claimed

log = logging.getLogger("lathe")

Perform = Callable[[str, Callable[[], object], Sequence[object]], object]

CARD = "trial.json"
RESULT = "compress.json"
PAGE = "compress.html"
PARTS = EVALUATION, EXPORT = "evaluation", "onnx"
CLOSE = 0.97  # of the target: what is nearer to it is not searched on
LARGEST = 0.75  # ratio
REST = 0.3  # of the cost, guessed to be left when all heads and channels are gone
MOST_INCREASE = 1e6  # of a perplexity, relative
STEP = 1 / 64  # of a ratio: finer ones give the same heads


def parse_goal(target: str, budget: str) -> Goal:
    """`latency=0.4` and `accuracy=-0.5` (points) or `perplexity=0.05` (relative).

    Raises:
        UserError: another word, not a number, or one that is no share and no loss.
    """
    of, share = _assignment("--target", target, get_args(Target))
    kind, allowed = _assignment("--budget", budget, get_args(Budget))
    if not 0 < share < 1:
        raise UserError(f"--target {target}: not a share", f"give one below 1, e.g. {of}=0.4")
    loss = -allowed / 100 if kind == "accuracy" else allowed
    if not 0 <= loss <= (1 if kind == "accuracy" else MOST_INCREASE):
        raise UserError(
            f"--budget {budget}: {'asks for a gain' if loss < 0 else 'not a loss to bear'}",
            "write accuracy=-0.5 for half a point lost, perplexity=0.05 for 5 % more",
        )
    return Goal(of, share, kind, loss)  # type: ignore[arg-type]


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
    """Try INT8 alone, then as much pruning as the target seems to need, nearer each time; write
    `compress.json` and `compress.html`, a picture of all trials.

    Every trial prunes, finetunes, ranks linears, quantizes, exports and evaluates, in a folder of
    its own under `output`; a killed search goes on with the trial, and the stage, it was in.

    Args:
        recipes: of evaluation and export, of pruning, and of quantization.
        trials: at most so many.
        run: called with a training stage's name, the stage and its command line's arguments; it
            may run it on several processes.

    Raises:
        UserError: `output` belongs to a search of other settings, or a recipe disables its stage;
            see also the stages.
    """
    require_enabled("Prune", recipes[1].Compress.Prune.enable)
    require_enabled("Quantization", recipes[2].Compress.Quantization.enable)
    perform = run or (lambda name, stage, arguments: stage())
    judged = ("Sensitivity", "Offline_Eval", "Export")
    free = {group: what for group, what in FREE.items() if group not in judged}
    if cloze:
        read_cloze(cloze, Tokenizer(models.BPE()))  # before the work; no words are needed for it
    identity: Identity = {
        "model": checkpoint_digest(model),
        "data": TokenDataset.open(data).digest,
        "settings": digest("".join(r.model_dump_json(exclude=free) for r in recipes)),
        "cloze": sha256(cloze) if cloze else "",
    }
    with claimed(output, identity, model, data, cloze):
        begin(output, identity)
        return _search(goal, recipes, model, data, output, trials, cloze, perform)


def _search(
    goal: Goal,
    recipes: tuple[Recipe, Recipe, Recipe],
    model: Path,
    data: Path,
    output: Path,
    trials: int,
    cloze: Path | None,
    perform: Perform,
) -> SearchResult:
    base, pruning, quantization = recipes
    dense = output / "dense"
    _measure_up(base, model, dense, data, cloze)

    def attempt(ratio: float) -> Trial:
        folder = output / trial_name(ratio)
        if (folder / CARD).is_file():
            known = read_as(folder / CARD, Trial, "delete the file: the trial is judged again")
            return replace(
                known, verdict=_verdict(base, goal, dense / EVALUATION, folder / EVALUATION)
            )
        log.info("trial %s", folder.name)
        source = model
        if ratio:
            own = _with_ratio(pruning, ratio)
            source, arguments = folder / "pruned", [model, "--data", data]
            perform(
                "prune",
                lambda: prune(own, model, data, folder / "pruned"),
                [*arguments, "--output", source, "-o", f"Compress.Prune.ratio={ratio}"],
            )
        ranked, int8 = folder / "sensitivity", folder / "int8"
        if not (ranked / SENSITIVITY.card).is_file():
            analyze(quantization, source, data, ranked)
        perform(
            "quantize",
            lambda: quantize(quantization, source, data, int8, ranked),
            [source, "--data", data, "--sensitivity", ranked, "--output", int8],
        )
        _measure_up(base, int8, folder, data, cloze)
        trial = weigh(base, goal, ratio, *(f / part for f in (dense, folder) for part in PARTS))
        with atomic_file(folder / CARD) as work:
            work.write_text(json.dumps(asdict(trial), indent=2) + "\n", encoding="utf-8")
        return trial

    done: list[Trial] = []
    for ratio in _ratios(goal, done):
        done.append(attempt(ratio))
        log.info("%s", done[-1])
        if len(done) == trials:
            break
    return conclude(goal, dense / EVALUATION, done, output)


def choose(
    recipe: Recipe,
    goal: Goal,
    dense: Sequence[Path],
    candidates: Sequence[tuple[float, Path, Path]],
    output: Path,
) -> SearchResult:
    """The same judgement of models that were made elsewhere.

    Args:
        dense: evaluation and export folder.
        candidates: ratio, evaluation and export folder of each INT8 model.
        output: folder for `compress.json` and `compress.html`.
    """
    evaluation, exported = dense
    claim_file(output / RESULT, SEARCH)
    claim_file(output / PAGE, HTML)
    trials = [
        weigh(recipe, goal, ratio, evaluation, exported, *folders) for ratio, *folders in candidates
    ]
    return conclude(goal, evaluation, trials, output)


def gather(
    ratios: Sequence[float],
    models: Sequence[Path],
    evaluations: Sequence[Path],
    exports: Sequence[Path],
) -> list[tuple[float, Path, Path]]:
    """The candidates of `choose`, whose checkpoints are whole.

    Raises:
        UserError: not as many of each, a ratio that is none, or a model that is no checkpoint.
    """
    counts = [len(part) for part in (ratios, models, evaluations, exports)]
    if len(set(counts)) > 1 or not ratios:
        raise UserError(
            f"there are {', '.join(map(str, counts))} ratios, models, evaluations and exports",
            "give as many of each, and one at least",
        )
    for ratio, model in zip(ratios, models, strict=True):
        if not (isinstance(ratio, float | int) and 0 <= ratio < 1):
            raise UserError(f"ratio {ratio!r}: not a share below 1", "give what was pruned")
        read_config(resolve(model))
        read_marker(model)
    return list(zip(ratios, evaluations, exports, strict=True))


def weigh(
    recipe: Recipe,
    goal: Goal,
    ratio: float,
    dense_evaluation: Path,
    dense_export: Path,
    evaluation: Path,
    exported: Path,
) -> Trial:
    """An INT8 model beside the dense one, from the folders that evaluation and export wrote."""
    name = trial_name(ratio)
    before, after = read_metrics(dense_evaluation), read_metrics(evaluation)
    figures = measure({"dense": dense_export, name: exported}, prompt_tokens=128)[name]
    return Trial(
        name=name,
        ratio=ratio,
        accuracy=(after["cloze"] or {}).get("accuracy"),
        perplexity=(after["text"] or {}).get("perplexity"),
        latency=1 / figures["decode_speedup"],
        prefill=1 / figures["prefill_speedup"],
        bytes=figures["bytes_ratio"],
        parameters=after["model"]["n_params"] / before["model"]["n_params"],
        verdict=_verdict(recipe, goal, dense_evaluation, evaluation),
    )


def conclude(
    goal: Goal, dense_evaluation: Path, trials: Sequence[Trial], output: Path
) -> SearchResult:
    """Choose the best of the trials; write `compress.json` and `compress.html` into `output`."""
    good = [trial for trial in trials if trial.meets(goal) and trial.verdict != "fail"]
    best = min(good, key=lambda trial: trial.ratio, default=None)
    before = read_metrics(dense_evaluation)
    dense = {
        "accuracy": (before["cloze"] or {}).get("accuracy"),
        "perplexity": (before["text"] or {}).get("perplexity"),
    }
    result = SearchResult(goal, dense, tuple(trials), best)
    output.mkdir(parents=True, exist_ok=True)
    with atomic_file(output / RESULT) as work:
        work.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    with atomic_file(output / PAGE) as work:
        work.write_text(pareto_page(result), encoding="utf-8")
    return result


def require_met(result: SearchResult) -> Trial:
    """The best trial.

    Raises:
        StageError: there is none.
    """
    if result.best is not None:
        return result.best
    goal = result.goal
    nearest = min(result.trials, key=lambda trial: float(getattr(trial, goal.target)))
    raise StageError(
        f"no trial met {goal.target} {goal.at_most:g} within the budget; {nearest.name} has "
        f"{goal.target} {getattr(nearest, goal.target):.3f}, budget: {nearest.verdict}. "
        "Allow more, finetune longer (Engine.max_steps), or try more often (--trials)"
    )


def _ratios(goal: Goal, done: Sequence[Trial]) -> Iterator[float]:
    """The next ratio to try: on the line through the two trials next to the target; ends when it is
    met so nearly that less pruning would miss it."""
    yield 0.0
    while True:
        values = sorted((trial.ratio, float(getattr(trial, goal.target))) for trial in done)
        missed = [v for v in values if v[1] > goal.at_most]
        met = [v for v in values if v[1] <= goal.at_most]
        if not missed or (met and met[0][1] >= CLOSE * goal.at_most):
            return
        (low, above), highest = missed[-1], met[0][0] - STEP if met else LARGEST
        (other, cost) = (met or missed[-2:-1] or [(1.0, REST * missed[0][1])])[0]
        slope = (cost - above) / (other - low) if cost != above else -above
        ratio = low + (CLOSE * goal.at_most - above) / slope
        ratio = min(max(round(ratio / STEP) * STEP, low + STEP), highest)
        if ratio <= low:
            return
        yield ratio


def _measure_up(recipe: Recipe, model: Path, folder: Path, data: Path, cloze: Path | None) -> None:
    if not (folder / EXPORT / EXPORTED.card).is_file():
        export(recipe, model, data, folder / EXPORT)
    if not (folder / EVALUATION / METRICS).is_file():
        evaluate(recipe, model, folder / EVALUATION, data, cloze)


def _verdict(recipe: Recipe, goal: Goal, baseline: Path, candidate: Path) -> str:
    """The gate's, with the budget as its only margin."""
    margins = {
        "cloze_measure": "accuracy",
        "max_accuracy_drop": goal.allowed if goal.budget == "accuracy" else 1.0,
        "max_perplexity_increase": goal.allowed if goal.budget == "perplexity" else 1e9,
    }
    tolerant = recipe.model_copy(update={"Gate": recipe.Gate.model_copy(update=margins)})
    return gate(tolerant, baseline, candidate).verdict


def _with_ratio(recipe: Recipe, ratio: float) -> Recipe:
    settings = recipe.Compress.Prune.model_copy(update={"ratio": ratio})
    compression = recipe.Compress.model_copy(update={"Prune": settings})
    return recipe.model_copy(update={"Compress": compression})


def trial_name(ratio: float) -> str:
    return f"pruned-{ratio:.4g}-int8" if ratio else "int8"


def _assignment(option: str, text: str, names: Sequence[str]) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        if name in names:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(
        f"{option} {text}: not understood", f"write one of {', '.join(names)}, as {names[0]}=0.4"
    )
