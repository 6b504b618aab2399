"""The page of a search: cost and quality of every trial."""

from matplotlib.axes import Axes

from lathe.model.architecture import HEAD
from lathe.search.trial import SearchResult
from lathe_base.pages.html import picture, render
from lathe_base.pages.style import Theme, draw

NAMES = {
    "latency": "decode time per token",
    "prefill": "prefill time",
    "bytes": "size of the ONNX file",
    "parameters": "parameters",
}


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
