"""Verbs that certify."""

from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Data, Overrides, RecipeName, as_options, load, output_option
from lathe.console import show
from lathe.errors import StageError


@app.command(
    "certify-resume",
    epilog="Example: lathe certify-resume -r small -o Engine.max_steps=200 --data run/data",
)
def certify_resume(
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="How often the training is killed.")] = 20,
    seed: Annotated[int, typer.Option(help="From which the kills are drawn.")] = 0,
    output: Annotated[Path, output_option("The certificate, JSON.")] = RUN / "certificate.json",
) -> None:
    """Prove that a training that is killed resumes to the very same model.

    It trains the recipe once without interruption, and once while its processes are killed with
    SIGKILL (one rank, all of them, or in the middle of a save) and started again. The certificate
    lists every kill and the SHA-256 of every tensor of both models; the status is 1 if they differ.
    """
    settings = load(recipe, override)
    from lathe.certify import certify_resume

    options = ["--recipe", recipe, *as_options(override)]
    found = certify_resume(settings, options, data, output, kills, seed)
    show(kills=len(found.kills), passed=found.passed, certificate=output)
    if found.difference:
        by = found.difference.largest
        how = "has another shape or type" if by is None else f"differs by up to {by:.3g}"
        raise StageError(f"the resumed training ended elsewhere: {found.difference.tensor} {how}")
    if not found.kills:
        raise StageError("the training ended before the first kill: train for more steps")
