"""The result of a search: its trials, compared with the dense model; the best of them;
`compress.json` and its page, `compress.html`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes

from lathe.evaluate.comparison import PAST
from lathe.evaluate.evaluation_folder import read_metrics
from lathe.evaluate.gate import gate
from lathe.evaluate.latency import measure
from lathe.model.architecture import HEAD
from lathe.model.folder import require_checkpoint
from lathe.search.design import Budget, Design, Goal, Proposal
from lathe_base.artifacts.kinds import PAGE as HTML
from lathe_base.artifacts.kinds import SEARCH
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.pages.html import picture, render
from lathe_base.pages.style import Theme, draw
from lathe_base.storage import atomic_file, claim_output_file

RESULT = "compress.json"
PAGE = "compress.html"

NAMES = {
    "latency": "decode time per token",
    "prefill": "prefill time",
    "bytes": "size of the ONNX file",
    "parameters": "parameters",
}

MEASURES: dict[Budget, str] = {"accuracy": "cloze accuracy", "perplexity": "perplexity"}
"""The measure of each budget, as the gate names it."""


@dataclass(frozen=True)
class Trial:
    """A compressed model: figures on the held-out data, and size and time as shares of the dense
    float32 model's.

    Attributes:
        verdict: the gate's, on the budget.
        design: its design, in a search.
        predicted: the predicted share of the target.
        cost: the predicted KL divergence from the dense model before training, nats per token.
    """

    name: str
    accuracy: float | None
    perplexity: float | None
    latency: float
    prefill: float
    bytes: float
    parameters: float
    verdict: str = ""
    design: Design | None = None
    predicted: float | None = None
    cost: float | None = None

    def __str__(self) -> str:
        """Its figures in one line."""
        quality = [
            *([f"cloze accuracy {self.accuracy:.2%}"] if self.accuracy is not None else []),
            *([f"perplexity {self.perplexity:.2f}"] if self.perplexity is not None else []),
        ]
        return (
            f"{self.name}: {', '.join(quality)}; latency {self.latency:.3f}, prefill "
            f"{self.prefill:.3f}, bytes {self.bytes:.3f}, parameters {self.parameters:.3f} of "
            f"dense; budget: {self.verdict}"
        )

    def meets(self, goal: Goal) -> bool:
        """Whether the trial reaches the target."""
        return self.reached(goal) <= goal.at_most

    def reached(self, goal: Goal) -> float:
        """The trial's value for the target, as a share of the dense model's."""
        return float(getattr(self, goal.target))


@dataclass(frozen=True)
class SearchResult:
    """All trials in order, and the best: the one with the best quality of those that meet the
    target within the budget."""

    goal: Goal
    dense: dict[str, float | None]
    trials: tuple[Trial, ...]
    best: Trial | None


def choose(
    recipe: Recipe,
    goal: Goal,
    proposals: Sequence[Proposal],
    dense: Sequence[Path],
    models: Sequence[Path],
    evaluations: Sequence[Path],
    exports: Sequence[Path],
    output: Path,
) -> SearchResult:
    """Compare models that were trained elsewhere, like the trials of a search.

    Args:
        proposals: the models' designs, in the same order.
        dense: evaluation and export folder of the dense model.
        output: folder for `compress.json` and `compress.html`.

    Raises:
        UserError: lists of different lengths, or a model that is not a checkpoint.
    """
    counts = [len(part) for part in (proposals, models, evaluations, exports)]
    if len(set(counts)) > 1 or not proposals:
        raise UserError(
            f"there are {', '.join(map(str, counts))} designs, models, evaluations and exports",
            "give the same number of each, at least one",
            Code.MISMATCH,
        )
    for model in models:
        require_checkpoint(model)
    claim_output_file(output / RESULT, SEARCH)
    claim_output_file(output / PAGE, HTML)
    trials = [
        evaluate_trial(recipe, goal, *parts, *dense)
        for parts in zip(proposals, evaluations, exports, strict=True)
    ]
    return conclude(goal, recipe.Gate, dense[0], trials, output)


def evaluate_trial(
    recipe: Recipe,
    goal: Goal,
    proposal: Proposal,
    evaluation: Path,
    exported: Path,
    dense_evaluation: Path,
    dense_export: Path,
) -> Trial:
    """Compare a compressed model with the dense one, given their evaluations and exports."""
    name = proposal.design.name
    before, after = read_metrics(dense_evaluation), read_metrics(evaluation)
    # Both in turn, since the machine may be slower today than when the dense model was measured.
    timings = measure({"dense": dense_export, name: exported}, prompt_tokens=128)[name]
    return Trial(
        name=name,
        accuracy=(after["cloze"] or {}).get("accuracy"),
        perplexity=(after["text"] or {}).get("perplexity"),
        latency=1 / timings["decode_speedup"],
        prefill=1 / timings["prefill_speedup"],
        bytes=timings["bytes_ratio"],
        parameters=after["model"]["n_params"] / before["model"]["n_params"],
        verdict=judge_candidate(recipe, goal, dense_evaluation, evaluation),
        design=proposal.design,
        predicted=proposal.predicted,
        cost=proposal.cost,
    )


def judge_candidate(recipe: Recipe, goal: Goal, baseline: Path, candidate: Path) -> str:
    """The gate's verdict on two evaluations, with the budget as the only margin.

    Raises:
        UserError: the evaluations lack the measure of the budget; see also `gate`.
    """
    # No margin for anything else: the last pattern that matches wins.
    margins = {"*": None, MEASURES[goal.budget]: goal.allowed}
    only = recipe.Gate.model_copy(update={"margins": margins})
    return gate(recipe.model_copy(update={"Gate": only}), baseline, candidate).verdict


def conclude(
    goal: Goal,
    settings: GateSettings,
    dense_evaluation: Path,
    trials: Sequence[Trial],
    output: Path,
) -> SearchResult:
    """Choose the best of the trials; write `compress.json` and `compress.html` into `output`.

    A trial meets the budget if the verdict is a pass, or inconclusive with `Gate.on_inconclusive:
    pass`.
    """
    enough = {"pass", "inconclusive"} if settings.on_inconclusive == "pass" else {"pass"}
    good = [trial for trial in trials if trial.meets(goal) and trial.verdict in enough]

    def badness(trial: Trial) -> tuple[float, float]:
        """The budget's measure, then perplexity; lower is better."""
        perplexity = math.inf if trial.perplexity is None else trial.perplexity
        wrong = 1 - (trial.accuracy or 0.0) if goal.budget == "accuracy" else perplexity
        return wrong, perplexity

    best = min(good, key=badness, default=None)
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
    """Return the best trial.

    Raises:
        StageError: no trial met the goal.
    """
    if result.best is not None:
        return result.best
    goal = result.goal
    # So that the message says how far the target is.
    nearest = min(result.trials, key=lambda trial: trial.reached(goal))
    raise StageError(
        f"no trial met {goal.target} {goal.at_most:g} within the budget; {nearest.name} has "
        f"{goal.target} {nearest.reached(goal):.3f}, budget: {PAST[nearest.verdict]}. Relax the "
        "target or the budget, evaluate on more text, finetune longer (Engine.max_steps), or allow "
        "more trials (--trials)",
        Code.GATE,
    )


def pareto_page(result: SearchResult) -> str:
    """A self-contained HTML page: quality over cost for the dense model and all trials, and a
    table."""
    goal = result.goal
    is_accuracy = goal.budget == "accuracy"
    quality = "cloze accuracy" if is_accuracy else "perplexity"
    title = f"{quality} against {NAMES[goal.target]}, as a share of dense float32"

    def paint(axes: Axes, theme: Theme) -> None:
        axes.axvline(goal.at_most, color=theme.accent, linewidth=1, linestyle=(0, (4, 2)))
        dense = result.dense[goal.budget]
        if dense is not None:
            limit = dense - goal.allowed if is_accuracy else dense * (1 + goal.allowed)
            axes.axhline(limit, color=theme.accent, linewidth=1, linestyle=(0, (4, 2)))
            axes.plot([1.0], [dense], "s", color=theme.ink)
            axes.annotate(
                "dense", (1.0, dense), xytext=(-5, 6), textcoords="offset points", ha="right"
            )
        for i, trial in enumerate(result.trials):
            value = getattr(trial, goal.budget)
            if value is None:
                continue
            is_best = result.best is not None and trial.name == result.best.name
            x = getattr(trial, goal.target)
            axes.plot([x], [value], "o", color=theme.color(0), markersize=8 if is_best else 5)
            axes.annotate(
                trial.name,
                (x, value),
                # Names of neighbours are set at two heights.
                xytext=(6, 4 + 9 * (i % 2)),
                textcoords="offset points",
                weight="bold" if is_best else "normal",
            )
        axes.set_xlabel(f"{NAMES[goal.target]} / dense")
        axes.set_ylabel(quality)
        axes.margins(0.15)

    drawn = picture(title, title, lambda theme: draw(3.2, theme, paint))
    designs = [trial.design for trial in result.trials if trial.design]
    paths = [name.split(".", 2) for design in designs for name in design.formats if name != HEAD]
    return render(
        "lathe/search/page.html.j2",
        "Quality cost of compression",
        result=result,
        picture_=drawn,
        blocks=paths[0][0] if paths else "",
        linears=list(dict.fromkeys(linear for *_, linear in paths)),
    )
