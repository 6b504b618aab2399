"""The command that prints and explains recipes."""

from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import Overrides, load
from lathe_base.errors import Code, UserError


@app.command(epilog="Example: lathe recipe gpt-345m -o Model.num_layers=12 > mine.yaml")
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="Recipe to print. Default: list all recipes.")
    ] = None,
    override: Overrides = None,
    from_megatron: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAGS|FILE",
            help="Print the recipe for flags of Megatron's pretrain_gpt.py: the flags as text, a "
            "shell script that contains them (not executed), or a ds_config.json; may be "
            "repeated. NAME=VALUE before a script sets one of its variables.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --from-megatron: number of GPUs, for the data-parallel degree and ZeRO. "
            "Default: decided at the start of a training.",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Explain a setting, or a whole group."),
    ] = None,
) -> None:
    """Print a fully resolved recipe as YAML.

    With --explain it prints a key's meaning, range and default, and its value in the recipe. With
    --from-megatron it translates a training command of Megatron-LM or Megatron-DeepSpeed.
    """
    import yaml

    from lathe_base.config.fleetx import with_locations
    from lathe_base.config.recipe import shipped_recipes

    if from_megatron:
        arguments = [name] if name is not None else override or ([explain] if explain else [])
        if arguments:
            raise UserError(
                f"{arguments[0]}: --from-megatron takes no recipe, no -o and no --explain",
                "save the printed recipe to a file first",
                Code.CONFLICTING_OPTIONS,
            )
        from lathe_base.config.megatron.recipe import recipe_from_megatron

        print(recipe_from_megatron(from_megatron, gpus), end="")
        return
    if gpus is not None:
        raise UserError(
            f"--gpus {gpus}: only for --from-megatron", "remove it", Code.CONFLICTING_OPTIONS
        )
    if name is None and override:
        raise UserError(
            f"-o {override[0]}: no recipe is given",
            "name one: lathe recipe tiny -o ...",
            Code.MISSING_OPTION,
        )
    if explain is not None:
        from lathe_base.config.explain import explain as explain_text

        print(explain_text(explain, load(name, override) if name is not None else None, name or ""))
        return
    if name is None:
        print("\n".join(shipped_recipes()))
        return
    settings = with_locations(load(name, override))
    print(yaml.safe_dump(settings, sort_keys=False), end="")
