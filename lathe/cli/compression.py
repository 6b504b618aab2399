"""Commands that compress a model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    DATA,
    EVALUATED_MODEL,
    RUN,
    TRAINED_MODEL,
    Data,
    Model,
    Output,
    Overrides,
    RecipeName,
    as_options,
    input_option,
    load,
    located,
    training_paths,
)
from lathe.cli.training import train
from lathe_base.console import show

if TYPE_CHECKING:
    from lathe_base.config.settings import Recipe


@app.command(epilog="Example: lathe prune run/dense -o Compress.Prune.ratio=0.25")
def prune(
    ctx: typer.Context,
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-prune",
    override: Overrides = None,
    output: Output = RUN / "pruned",
) -> None:
    """Prune attention heads, FFN channels and layers, then finetune the model."""
    settings = load(recipe, override)
    from lathe import backends

    model = located(ctx, settings, "model", model, TRAINED_MODEL)
    data, output = training_paths(ctx, settings, data, output)
    train(settings, lambda: backends.of(settings).prune(settings, model, data, output))


@app.command(epilog="Example: lathe analyze run/pruned -o Sensitivity.metric=kl")
def analyze(
    ctx: typer.Context,
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "sensitivity",
) -> None:
    """Rank linear layers by the quality cost of INT8, and choose which to keep in float.

    Sensitivity.mode ptq (the default) quantizes one layer at a time, qat returns one layer at a
    time of a quantized MODEL to float, fisher estimates all at once from gradients.
    Sensitivity.metric is the unit of the cost: loss, kl or accuracy. It keeps as few layers in
    float as possible while the predicted cost of the others stays within Sensitivity.budget; with
    Sensitivity.bits_per_weight, it finds the best mix of formats of that size. Charts are in
    sensitivity.html.
    """
    settings = load(recipe, override)
    from lathe import backends

    model = located(ctx, settings, "model", model, EVALUATED_MODEL)
    data = located(ctx, settings, "data", data, DATA)
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
    ctx: typer.Context,
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    sensitivity: Annotated[
        Path | None,
        input_option("Folder written by `lathe analyze`, whose choice of formats is applied."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Quantize without training in the best measured format: of at most bytes=SHARE of "
            "float32, or loss=RELATIVE INCREASE of perplexity."
        ),
    ] = None,
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "int8",
) -> None:
    """Finetune a model with simulated INT8 or INT4 arithmetic (quantization-aware training).

    `-o Engine.max_steps=0` quantizes it without training. So does --target, which chooses the
    format and says what to expect of it.
    """
    settings = load(recipe, override)
    from lathe import backends

    model = located(ctx, settings, "model", model, TRAINED_MODEL)
    if target is not None:
        from lathe.compress.plan import Target, choose_expectation
        from lathe.model.folder import open_folder
        from lathe.search.design import assignment

        config = open_folder(model).config
        kind, limit = assignment("--target", target, get_args(Target))
        best = choose_expectation(kind, limit, config)  # type: ignore[arg-type]
        # The user's own overrides come last, and win.
        settings = load(recipe, [*best.overrides(), *(override or [])])
        show(
            format=best.name,
            expected_bytes=f"{best.share(config):.3f} of float32",
            expected_perplexity=f"{best.perplexity_increase:+.1%} (SmolLM2-135M on WikiText)",
        )
    data, output = training_paths(ctx, settings, data, output)
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
            help="Target as a share of the dense model: latency (per decoded token), prefill, "
            "bytes or parameters=SHARE."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(
            help="Quality budget: accuracy=-POINTS on the cloze set, or "
            "perplexity=RELATIVE INCREASE."
        ),
    ],
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    cloze: Annotated[
        Path | None,
        input_option("Cloze set: JSONL in LAMBADA's format. Default: held-out examples."),
    ] = None,
    recipe: RecipeName = "tiny",
    prune_recipe: Annotated[
        str, typer.Option(help="Recipe for pruning and the finetuning after it.")
    ] = ("tiny-prune"),
    qat_recipe: Annotated[str, typer.Option(help="Recipe for quantization-aware training.")] = (
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
    """Find the best model that meets a speed or size target.

    Jointly chooses the layers, the heads and FFN channels of every layer, and the format of every
    linear, by their quality cost, estimated from gradients, and their effect on the target,
    measured on this machine. A design is measured, and corrected if it misses the target, before
    the model is pruned, trained, quantized, trained, exported and measured again. Add -o
    Compress.Quantization.weight_bits=4 to include INT4. A killed search resumes, and a search with
    another target reuses earlier results. The exit status is 1 if no model meets target and
    budget.
    """
    names = (recipe, prune_recipe, qat_recipe)
    settings = tuple(load(name, override) for name in names)
    from lathe.backends import start_workers
    from lathe.search.compress import QUANTIZED, compress
    from lathe.search.design import override as group_override
    from lathe.search.design import parse_goal
    from lathe.search.result import PAGE, require_met

    def run(
        verb: str, stage_recipe: "Recipe", stage: Callable[[], object], arguments: Sequence[object]
    ) -> None:
        name, group = (prune_recipe, "Prune") if verb == "prune" else (qat_recipe, "Quantization")
        # Workers run a command of their own, to which the design is passed as an override.
        chosen = [*(override or []), group_override(stage_recipe, group)]
        options = ["--recipe", name, *as_options(chosen)]
        start_workers([verb, *options, *map(str, arguments)], stage_recipe)
        stage()

    goal = parse_goal(target, budget)
    result = compress(goal, settings, model, data, output, trials, cloze, run)  # type: ignore[arg-type]
    for trial in result.trials:
        show(trial=str(trial))
    show(picture=output / PAGE)
    best = require_met(result)
    show(best=best.name, model=output / best.name / QUANTIZED, onnx=output / best.name / "onnx")
