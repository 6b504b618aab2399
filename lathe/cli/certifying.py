"""Verbs that prove something by doing it again."""

from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    Data,
    Output,
    Overrides,
    RecipeName,
    as_options,
    input_argument,
    load,
    output_option,
)
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
    It is signed if LATHE_SIGNING_KEY names a key; the option --certificate of `lathe report` shows
    it.
    """
    settings = load(recipe, override)
    from lathe.production.certify.resume import certify_resume

    options = ["--recipe", recipe, *as_options(override)]
    found = certify_resume(settings, options, data, output, kills, seed)
    show(kills=len(found.kills), passed=found.passed, certificate=output)
    found.require()


@app.command(epilog="Example: lathe rebuild run/int8-onnx --key signing.pub --output rebuilt")
def rebuild(
    folder: Annotated[Path, input_argument("A data set, a checkpoint, an export or a release.")] = (
        RUN / "int8-onnx"
    ),
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PUBLIC",
            help="A public key to verify the attestations with; may be repeated. Without one "
            "they are believed.",
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Where the corpus is now, if it has moved; repeated for several.",
        ),
    ] = None,
    output: Output = RUN / "rebuilt",
) -> None:
    """Repeat every step behind a folder, and compare the bytes that come out.

    The steps run with the recipe, seeds and threads that their attestations tell. On the same kind
    of CPU with the same libraries an INT8 ONNX file comes out with the same SHA-256. A rebuild
    stops at the first step that comes out different, with status 1, and names the first tensor; one
    that was killed resumes.
    """
    from lathe.production.certify.rebuild import rebuild

    done = rebuild(folder, output, tuple(key or ()), tuple(corpus or ()))
    for found in done:
        files = ", ".join(found.different or found.same) or "nothing to compare"
        show(**{found.step: f"{'DIFFERENT' if found.different else 'the same'}: {files}"})
    if done[-1].different:
        raise StageError(f"`{done[-1].step}` came out different. {done[-1].detail}")
