"""Verbs that make a model smaller."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    Data,
    Model,
    Output,
    Overrides,
    RecipeName,
    as_options,
    input_option,
    load,
)
from lathe.cli.workers import train
from lathe.console import show

if TYPE_CHECKING:
    from lathe.config.settings import Recipe


@app.command(epilog="Example: lathe prune run/dense -o Compress.Prune.ratio=0.25")
def prune(
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-prune",
    override: Overrides = None,
    output: Output = RUN / "pruned",
) -> None:
    """Remove whole attention heads and FFN channels, then finetune what is left."""
    settings = load(recipe, override)
    from lathe import backends

    train(settings, lambda: backends.of(settings).prune(settings, model, data, output))


@app.command(epilog="Example: lathe analyze run/pruned -o Sensitivity.metric=kl")
def analyze(
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "sensitivity",
) -> None:
    """Rank the linear layers by what INT8 costs in each, and choose those to leave in float.

    Sensitivity.mode ptq (the default) quantizes one at a time, qat takes one at a time of a
    quantized MODEL back to float, fisher estimates all at once from gradients. The cost is in
    Sensitivity.metric loss, kl or accuracy. As few layers stay in float as possible while the
    predicted cost of the others is within Sensitivity.budget. Pictures are in sensitivity.html.
    """
    settings = load(recipe, override)
    from lathe import backends

    result = backends.of(settings).analyze(settings, model, data, output)
    worst = result.linears[0]
    show(
        analysis=output,
        metric=result.metric,
        baseline=result.baseline,
        most_sensitive=f"{worst.name} ({worst.score:+.2g})",
        leave_in_float=", ".join(result.skip) or "none",
        predicted_cost=result.predicted,
        estimate_rank_correlation=result.rank_correlation,
    )


@app.command(epilog="Example: lathe quantize run/pruned --sensitivity run/sensitivity")
def quantize(
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    sensitivity: Annotated[
        Path | None, input_option("Folder of `lathe analyze`, whose choice of formats is followed.")
    ] = None,
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "int8",
) -> None:
    """Finetune a model with simulated INT8 or INT4 arithmetic (quantization-aware training).

    `-o Engine.max_steps=0` quantizes it without training.
    """
    settings = load(recipe, override)
    from lathe import backends

    train(
        settings, lambda: backends.of(settings).quantize(settings, model, data, output, sensitivity)
    )


@app.command(
    epilog="Example: lathe compress run/dense --target latency=0.5 --budget perplexity=0.05"
)
def compress(
    target: Annotated[
        str,
        typer.Option(
            help="latency (of a decoded token), prefill, bytes or parameters=SHARE of dense."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(help="accuracy=-POINTS of the cloze set, or perplexity=RELATIVE INCREASE."),
    ],
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    cloze: Annotated[
        Path | None, input_option("LAMBADA-format JSONL; held-out examples unless given.")
    ] = None,
    recipe: RecipeName = "tiny",
    prune_recipe: Annotated[str, typer.Option(help="Of pruning and its finetuning.")] = (
        "tiny-prune"
    ),
    qat_recipe: Annotated[str, typer.Option(help="Of quantization and its training.")] = (
        "tiny-qat"
    ),
    override: Overrides = None,
    trials: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of designs to train; bytes and parameters need only one.",
        ),
    ] = 2,
    output: Output = RUN / "compressed",
) -> None:
    """Make the best model that meets a target of speed or size.

    Chooses the heads and FFN channels of every layer, the layers, and the format of every linear
    together: by what each costs in quality, estimated from gradients, and what it takes of the
    target, measured on this machine. A design is measured, and corrected if it misses the target,
    before it is pruned, trained, quantized, trained, exported and measured again. INT4 is among the
    formats with -o Compress.Quantization.weight_bits=4. A killed search resumes, and another target
    reuses what was found out. Status 1 if no model meets target and budget.
    """
    names = (recipe, prune_recipe, qat_recipe)
    settings = tuple(load(name, override) for name in names)
    from lathe.backends import start_workers
    from lathe.search.compress import QUANTIZED, compress
    from lathe.search.design import override as group_override
    from lathe.search.goal import parse_goal
    from lathe.search.result import PAGE, require_met

    def run(
        verb: str, own: "Recipe", stage: Callable[[], object], arguments: Sequence[object]
    ) -> None:
        name, group = (prune_recipe, "Prune") if verb == "prune" else (qat_recipe, "Quantization")
        chosen = [*(override or []), group_override(own, group)]
        options = ["--recipe", name, *as_options(chosen)]
        start_workers([verb, *options, *map(str, arguments)], own)
        stage()

    goal = parse_goal(target, budget)
    found = compress(goal, settings, model, data, output, trials, cloze, run)  # type: ignore[arg-type]
    for trial in found.trials:
        show(trial=str(trial))
    show(picture=output / PAGE)
    best = require_met(found)
    show(best=best.name, model=output / best.name / QUANTIZED, onnx=output / best.name / "onnx")
