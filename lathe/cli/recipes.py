"""The command that prints and explains recipes."""

from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import Overrides, load
from lathe.errors import UserError


@app.command(epilog="Example: lathe recipe gpt-345m -o Model.num_layers=12 > mine.yaml")
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="Recipe to print. Default: list all recipes.")
    ] = None,
    override: Overrides = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Explain a setting, or a whole group."),
    ] = None,
) -> None:
    """Print a fully resolved recipe as YAML.

    With --explain it prints a key's meaning, range and default, and its value in the recipe.
    """
    import yaml

    from lathe.config.fleetx import with_locations
    from lathe.config.recipe import shipped_recipes

    if name is None and override:
        raise UserError(
            f"-o {override[0]}: no recipe is given", "name one: lathe recipe tiny -o ..."
        )
    if explain is not None:
        from lathe.config.explain import explain as text_of

        print(text_of(explain, load(name, override) if name is not None else None, name or ""))
        return
    if name is None:
        print("\n".join(shipped_recipes()))
        return
    settings = with_locations(load(name, override))
    print(yaml.safe_dump(settings, sort_keys=False), end="")
