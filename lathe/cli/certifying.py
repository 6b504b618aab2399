"""Commands that prove a property by repeating work."""

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
from lathe_base.console import show
from lathe_base.errors import Code, StageError


@app.command(
    "certify-resume",
    epilog="Example: lathe certify-resume -r small -o Engine.max_steps=200 --data run/data",
)
def certify_resume(
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of times to kill the training.")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed for the kills.")] = 0,
    output: Annotated[Path, output_option("Output JSON file with the certificate.")] = RUN
    / "certificate.json",
) -> None:
    """Prove that killed and resumed training produces exactly the same model.

    Trains the recipe once without interruption, and once while killing its processes with SIGKILL
    (one rank, all of them, or in the middle of a save) and restarting them. The certificate lists
    every kill and the SHA-256 of every tensor of both models; the exit status is 1 if they differ.
    It is signed if LATHE_SIGNING_KEY names a key. The option --certificate of `lathe report`
    includes it in a report.
    """
    settings = load(recipe, override)
    from lathe.release.certify.resume import certify_resume

    options = ["--recipe", recipe, *as_options(override)]
    result = certify_resume(settings, options, data, output, kills, seed)
    show(kills=len(result.kills), passed=result.passed, certificate=output)
    result.require()


@app.command(epilog="Example: lathe rebuild run/int8-onnx --key signing.pub --output rebuilt")
def rebuild(
    folder: Annotated[
        Path, input_argument("Folder with a data set, checkpoint, export or release.")
    ] = (RUN / "int8-onnx"),
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PUBLIC",
            help="Public key to verify the attestations with; may be repeated. Without one, "
            "attestations are not verified.",
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="New location of the corpus, if it has moved; may be repeated.",
        ),
    ] = None,
    output: Output = RUN / "rebuilt",
) -> None:
    """Rebuild a folder from its attested steps, and compare the bytes.

    The steps run with their attested recipes, seeds and threads. On the same kind of CPU with the
    same libraries, an INT8 ONNX file gets the same SHA-256. A rebuild stops at the first step
    whose output differs, with exit status 1, and names the first tensor that differs. A killed
    rebuild resumes.
    """
    from lathe.release.certify.rebuild import rebuild

    done = rebuild(folder, output, tuple(key or ()), tuple(corpus or ()))
    for result in done:
        files = ", ".join(result.different or result.same) or "nothing to compare"
        show(**{result.step: f"{'DIFFERENT' if result.different else 'the same'}: {files}"})
    if done[-1].different:
        raise StageError(
            f"the output of `{done[-1].step}` differs. {done[-1].detail}", Code.MISMATCH
        )
