"""`lathe release`: publish, list and roll back releases."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Overrides, RecipeName, input_argument, input_option, load
from lathe_base.console import show

if TYPE_CHECKING:
    from lathe.release.publish import Production

release = typer.Typer(
    help="Publish, list and roll back releases.",
    no_args_is_help=True,
)
app.add_typer(release, name="release")


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
