"""Commands that write model cards and bills of materials; and `lathe release`, which publishes,
lists and rolls back releases."""

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    Overrides,
    RecipeName,
    input_argument,
    input_option,
    load,
    model_argument,
    output_option,
)
from lathe_base.console import show

if TYPE_CHECKING:
    from lathe.release.publish import Production
    from lathe.report.cards.evidence import Evidence

Subject = Annotated[Path, model_argument("Folder with a checkpoint, Hugging Face model or export.")]
Evaluation = Annotated[
    Path | None, input_option("Folder written by `lathe evaluate` for this model.")
]
GateVerdict = Annotated[
    Path | None, input_option("JSON file written by `lathe gate` with this model as the candidate.")
]
Exported = Annotated[
    Path | None, input_option("Folder written by `lathe export` for this checkpoint.")
]
Corpus = Annotated[
    Path | None,
    input_option(
        "Training data, if the checkpoint does not record it (Hugging Face models, "
        "earlier versions)."
    ),
]
Timestamp = Annotated[
    datetime | None,
    typer.Option(
        metavar="TIME",
        formats=["%Y-%m-%dT%H:%M:%S%z"],
        help="Timestamp of the document, such as 2026-01-31T12:00:00+0000. Default: none.",
    ),
]


release = typer.Typer(
    help="Publish, list and roll back releases.",
    no_args_is_help=True,
)
app.add_typer(release, name="release")


@app.command(epilog="Example: lathe card run/int8 --evaluation run/int8-eval -o Card.license=MIT")
def card(
    model: Subject = RUN / "int8",
    evaluation: Evaluation = None,
    gate: GateVerdict = None,
    export: Exported = None,
    data: Corpus = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: Annotated[Path, output_option("Output Markdown file.")] = RUN / "README.md",
) -> None:
    """Write a model card: README.md with Hugging Face's metadata, evaluation results and
    limitations.

    Every checkpoint already has one without results. What cannot be measured, such as the license
    and the intended use, comes from the Card group of the recipe that trained the model; keys
    given here override it.
    """
    evidence = _evidence(model, evaluation, gate, export, data, recipe, override)
    from lathe.model.card import CARD
    from lathe.report.cards.release import model_card, write_document

    write_document(output, CARD, model_card(evidence), model, evaluation, export, data)
    show(card=output, model=evidence.name, figures=len(evidence.figures))


@app.command(epilog="Example: lathe bom run/int8 --export run/int8-onnx --output bom.cdx.json")
def bom(
    model: Subject = RUN / "int8",
    evaluation: Evaluation = None,
    gate: GateVerdict = None,
    export: Exported = None,
    data: Corpus = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    timestamp: Timestamp = None,
    output: Annotated[Path, output_option("Output JSON file.")] = RUN / "bom.cdx.json",
) -> None:
    """Write a model's bill of materials: files, training data, ancestors, results (CycloneDX 1.6).

    The output is reproducible: the same model and results give the same bytes.
    """
    evidence = _evidence(model, evaluation, gate, export, data, recipe, override)
    from lathe.report.cards.bom import BOM, model_bom
    from lathe.report.cards.release import write_document

    text = model_bom(evidence, timestamp)
    write_document(output, BOM, text, model, evaluation, export, data)
    show(bom=output, model=evidence.name, digest=evidence.digest)


@app.command(epilog="Example: lathe sbom images/serve/requirements.lock --output serve.cdx.json")
def sbom(
    lock: Annotated[Path, input_argument("Lock file with pinned packages and their hashes.")],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the environment. Default: lathe- and the name of the lock file's folder."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME@sha256:DIGEST", help="Container image built from the lock file."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="HOST/NAME:TAG", help="Base image of that image."),
    ] = None,
    timestamp: Timestamp = None,
    output: Annotated[Path, output_option("Output JSON file.")] = RUN / "sbom.cdx.json",
) -> None:
    """Write the bill of materials of an environment, from its lock file (CycloneDX 1.6).

    It lists every package by URL with the SHA-256 of each file that may be installed, and the
    dependencies between them. `make sbom` writes those of all environments.
    """
    from lathe.report.cards.bom import BOM, environment_sbom
    from lathe.report.cards.release import write_document

    name = name or f"lathe-{lock.resolve().parent.name}"
    write_document(output, BOM, environment_sbom(lock, name, image, timestamp, base), lock)
    show(sbom=output, environment=name)


@app.command(epilog="Example: lathe audit build/sbom/serve.cdx.json --advisories osv.json")
def audit(
    sbom: Annotated[
        Path, input_argument("CycloneDX file written by `lathe sbom`, or a release's folder.")
    ] = RUN / "sbom.cdx.json",
    advisories: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Additional advisories, JSON in OSV format; may be repeated."
        ),
    ] = None,
    vex: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Statements of what is not affected, JSON in OpenVEX format; may be repeated.",
        ),
    ] = None,
) -> None:
    """List the known vulnerabilities of an environment, from its bill of materials.

    Lathe ships advisories for Triton, with statements about what a server set up by Lathe does not
    expose. The exit status is 0 if no other vulnerability is found, and 1 otherwise.
    """
    from rich.console import Console

    from lathe.report.cards.audit import (
        audit_table,
        find_vulnerabilities,
        read_advisories,
        read_statements,
        unexcused,
    )

    known = read_advisories(advisories or [])
    vulnerabilities = find_vulnerabilities(sbom, known, read_statements(vex or []))
    Console(width=None if sys.stdout.isatty() else 160).print(audit_table(vulnerabilities))
    left = unexcused(vulnerabilities)
    show(
        advisories=f"{len(known)}, the latest of {max(one.modified for one in known)[:10]}",
        affected=len(left),
        excused=len(vulnerabilities) - len(left),
    )
    if left:
        raise typer.Exit(1)


def _evidence(
    model: Path,
    evaluation: Path | None,
    gate: Path | None,
    export: Path | None,
    data: Path | None,
    recipe: str,
    override: list[str] | None,
) -> "Evidence":
    settings = load(recipe, override)
    from lathe.report.cards.evidence import read_evidence

    stated = settings.Card.model_dump(exclude_unset=True)
    return read_evidence(model, evaluation, gate, export, data, stated)


@release.command(
    epilog="Example: lathe release publish run/deploy -o Production.releases=s3://models/releases"
)
def publish(
    deployed: Annotated[Path, input_argument("Folder written by `lathe deploy`.")] = RUN / "deploy",
    evaluation: Annotated[
        Path | None,
        input_option(
            "Folder written by `lathe evaluate`, whose results are stored with the release."
        ),
    ] = None,
    gate: Annotated[
        Path | None, input_option("Verdict written by `lathe gate`, for Production.require.")
    ] = None,
    model: Annotated[
        Path | None,
        input_option("Checkpoint, for the release's model card and bills of materials."),
    ] = None,
    replaces: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Digest of the live release, which the model was compared with. Any other one "
            "stays live. Required if a release is live.",
        ),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Publish a deployed model repository, test it, and make it live.

    The repository is uploaded below Production.releases under its digest, downloaded and served
    again, and tested with its golden prompts, a load test within Production.p99_*, and malformed
    requests. Then the Deployment of the current cluster, if there is one, is rolled to it. If any
    of this fails, the current release stays live.
    """
    settings = load(recipe, override)
    from lathe.release.publish import publish_release
    from lathe.release.release import open_releases

    live = open_releases(settings).find(replaces) if replaces else None
    _show_live(publish_release(settings, deployed, evaluation, gate, model, live))


@release.command(epilog="Example: lathe release rollback -o Production.releases=s3://models/rel")
def rollback(
    to: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="Digest of the release. Default: the one before the live one."
        ),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Roll back to a release that was live before."""
    settings = load(recipe, override)
    from lathe.release.publish import roll_back

    _show_live(roll_back(settings, to))


@release.command(
    "list", epilog="Example: lathe release list -o Production.releases=s3://models/releases"
)
def list_releases(recipe: RecipeName = "tiny", override: Overrides = None) -> None:
    """List the published releases: digest, date, evaluation results, and which is or was live."""
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.release.publish import releases_table

    Console(width=None if sys.stdout.isatty() else 120).print(releases_table(settings))


def _show_live(made: "Production") -> None:
    test = made.acceptance
    show(
        live=made.address,
        before=made.before,
        golden_prompts=test and f"{test.identical} of {test.prompts} identical",
        p99_first_token_ms=test and test.first_token_ms,
        p99_between_tokens_ms=test and test.between_tokens_ms,
        rolled="the Deployment"
        if made.rolled
        else "no Deployment; only the release pointer was updated",
    )
