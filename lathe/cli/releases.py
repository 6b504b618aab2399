"""`lathe release`: put a deployment into production, list what has been published, go back."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Overrides, RecipeName, input_argument, input_option, load
from lathe.console import show

if TYPE_CHECKING:
    from lathe.production.publish import Production

release = typer.Typer(
    help="Put a deployment into production, list what has been published, and go back.",
    no_args_is_help=True,
)
app.add_typer(release, name="release")


@release.command(
    epilog="Example: lathe release publish run/deploy -o Production.releases=s3://models/releases"
)
def publish(
    deployed: Annotated[Path, input_argument("Folder of `lathe deploy`.")] = RUN / "deploy",
    evaluation: Annotated[
        Path | None, input_option("Folder of `lathe evaluate`, whose figures the release keeps.")
    ] = None,
    gate: Annotated[
        Path | None, input_option("Verdict of `lathe gate`, for Production.require.")
    ] = None,
    model: Annotated[
        Path | None, input_option("The checkpoint, for the release's card and bills of materials.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Publish a deployed model repository, test it from the store, and make it live.

    The repository is published below Production.releases under its digest, fetched back, served
    again, held to its golden prompts, a load within Production.p99_* and malformed requests, and
    the Deployment of the current cluster is rolled to it, if there is one. Where that fails, what
    was live is live.
    """
    settings = load(recipe, override)
    from lathe.production.publish import publish_release

    _show_live(publish_release(settings, deployed, evaluation, gate, model))


@release.command(epilog="Example: lathe release rollback -o Production.releases=s3://models/rel")
def rollback(
    to: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="Which release; the one before the live one if not."),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Make a release live again that was live before."""
    settings = load(recipe, override)
    from lathe.production.publish import roll_back

    _show_live(roll_back(settings, to))


@release.command(
    "list", epilog="Example: lathe release list -o Production.releases=s3://models/releases"
)
def list_releases(recipe: RecipeName = "tiny", override: Overrides = None) -> None:
    """List what has been published: digest, when, what is and was live, and how good it is."""
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.production.publish import releases_table

    Console(width=None if sys.stdout.isatty() else 120).print(releases_table(settings))


def _show_live(made: "Production") -> None:
    test = made.acceptance
    show(
        live=made.address,
        before=made.before,
        golden_prompts=test and f"{test.identical} of {test.prompts} the same to the end",
        p99_first_token_ms=test and test.first_token_ms,
        p99_between_tokens_ms=test and test.between_tokens_ms,
        rolled="the Deployment" if made.rolled else "no Deployment: the pointer alone has moved",
    )
