"""Verbs that train, and plan a training."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Data, Output, Overrides, RecipeName, input_option, load
from lathe.cli.workers import train
from lathe.console import show


@app.command(epilog="Example: lathe pretrain -r gpt-345m -o Engine.max_steps=1000 --data run/data")
def pretrain(
    data: Data = RUN / "data",
    init: Annotated[
        Path | None, input_option("Checkpoint, or HF GPT-2, folder to start from.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Train a GPT on a token data set; a run that was stopped resumes from its last saved state.

    With -o Distributed.dp_degree=2 it starts two worker processes; under torchrun it is one.
    """
    settings = load(recipe, override)
    from lathe.train.pretrain import pretrain

    train(settings, lambda: pretrain(settings, data, output, init))


@app.command(epilog="Example: lathe plan --recipe gpt-6.7b --gpus 16 --memory 80GB")
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.")],
    memory: Annotated[str, typer.Option(help="Of one GPU: 80GB, 24g or 40GiB.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that NVLink joins.")] = 8,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Show the ways to divide a training over GPUs that fit their memory, and pick the fastest.

    The recipe's global batch stays as it is: a layout changes speed and memory, not what is
    learned. Where it cannot be divided over all GPUs, some stay idle. Speeds are of one layout
    against another, from a model of a DGX A100.
    """
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.train.layout import options
    from lathe.train.plan import make_plan, parse_memory, plan_table

    found = make_plan(settings, gpus, parse_memory(memory), gpus_per_node)
    Console(width=None if sys.stdout.isatty() else 120).print(plan_table(found))
    chosen = " ".join(f"-o {option}" for option in options(settings, found.best.layout))
    show(
        GPUs=found.idle(),
        pick=str(found.best.layout),
        options=chosen or "none: it is the recipe's own",
        recipe=found.verdict(),
    )
