"""`python -m lathe_paddle VERB`: the stages of the Paddle engine, in its environment."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.backends.paddle_process import MARK_VARIABLE, write_outcome
from lathe.cli.options import (
    Data,
    Model,
    Output,
    OutputBeside,
    Overrides,
    RecipeName,
    Tasks,
    parse_tasks,
    upload_outputs,
)
from lathe_base.console import log_to_stderr
from lathe_base.errors import EXPECTED_ERRORS, coded, explain
from lathe_launch.parent import die_with_parent
from lathe_paddle.environment import prepare

if TYPE_CHECKING:
    from lathe_base.config.settings import Recipe

log = logging.getLogger("lathe")

NAMES = {
    "RANK": "PADDLE_TRAINER_ID",
    "LOCAL_RANK": "PADDLE_LOCAL_RANK",
    "GROUP_WORLD_SIZE": "PADDLE_NNODES",
}
"""Environment variables of a worker: torchrun's names, which the rest of Lathe reads, and
Paddle's."""

app = typer.Typer(
    help="Stages of lathe that PaddlePaddle and PaddleSlim support, with lathe's options.",
    no_args_is_help=True,
    add_completion=False,
    result_callback=upload_outputs,
    pretty_exceptions_enable=False,
)


@app.command()
def prune(
    model: Model,
    data: Data,
    output: Output,
    recipe: RecipeName = "tiny-prune-paddle",
    override: Overrides = None,
) -> None:
    """Remove whole attention heads and FFN channels with PaddleSlim, then finetune."""

    # Imported only here, because `prepare` has to run before anything imports paddle.
    def run(settings: "Recipe") -> None:
        from lathe_paddle.prune import prune

        prune(settings, model, data, output)

    _in_workers(_load(recipe, override), run)


@app.command()
def quantize(
    model: Model,
    data: Data,
    output: Output,
    sensitivity: Annotated[Path | None, typer.Option(help="Folder of `lathe analyze`.")] = None,
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
) -> None:
    """Quantization-aware training with PaddleSlim."""

    def run(settings: "Recipe") -> None:
        from lathe_paddle.quantize import quantize

        quantize(settings, model, data, output, sensitivity)

    _in_workers(_load(recipe, override), run)


@app.command()
def analyze(
    model: Model,
    data: Data,
    output: Output,
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
) -> None:
    """Rank the linear layers by what INT8 costs in each, measured with Paddle."""
    settings = _load(recipe, override)
    from lathe_paddle.analyze import analyze

    analyze(settings, model, data, output)


@app.command()
def evaluate(
    model: Model,
    data: Annotated[Path | None, typer.Option(help="Folder of `lathe prepare`.")] = None,
    cloze: Annotated[Path | None, typer.Option(help="LAMBADA-format JSONL.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, for the perplexity.")] = None,
    task: Tasks = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Measure cloze accuracy, perplexity and other tasks of a checkpoint with Paddle."""
    settings = _load(recipe, override)
    from lathe_paddle.evaluate import evaluate

    output = output or model.with_name(f"{model.name}-eval")
    evaluate(settings, model, output, data, cloze, text, parse_tasks(task))


@app.command()
def export(
    model: Model,
    data: Data,
    output: Output,
    served: Annotated[
        Path | None, typer.Option(help="Folder of `lathe export`, to compare with.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Write .pdmodel, .pdiparams and paddle2onnx's graph of a checkpoint, and prove them."""
    settings = _load(recipe, override)
    from lathe_paddle.export import export

    export(settings, model, data, output, served)


def main() -> None:
    """Like `lathe.cli.main`: a user's mistake gives one message and exit status 2."""
    if MARK_VARIABLE in os.environ or "PADDLE_TRAINER_ID" in os.environ:
        die_with_parent()
    if MARK_VARIABLE in os.environ:
        # To stdout, with the prefix by which `lathe.backends.paddle_process` knows the lines.
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(f"{os.environ[MARK_VARIABLE]}%(message)s"))
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.INFO)
    else:
        log_to_stderr()
    os.environ |= {ours: os.environ[name] for ours, name in NAMES.items() if name in os.environ}
    try:
        prepare()
        app(prog_name="python -m lathe_paddle")
    except EXPECTED_ERRORS as error:
        outcome = explain(error)
        if not write_outcome(outcome):
            for line in coded(outcome).splitlines():
                log.error("%s", line)
        sys.exit(outcome.status)


def _load(name: str, overrides: list[str] | None) -> "Recipe":
    from lathe_base.config.recipe import load_recipe

    return load_recipe(name, overrides or [])


def _in_workers(settings: "Recipe", run: Callable[["Recipe"], None]) -> None:
    """Call `run` here, or run this whole command again in the processes that the recipe asks
    for."""
    if "PADDLE_TRAINER_ID" not in os.environ:
        from lathe_paddle.launch import launch, shape

        wanted = shape(settings.Distributed)
        if wanted.processes > 1:
            launch(sys.argv[1:], wanted)
            return
    run(settings)


if __name__ == "__main__":
    main()
