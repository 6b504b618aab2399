"""Options and arguments that several commands share, and helpers to parse them."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lathe_base.artifacts.remote import input_path, is_first_node, output_path
from lathe_base.errors import Code, UserError, printable

if TYPE_CHECKING:
    from lathe_base.artifacts.mirror import Mirror
    from lathe_base.config.settings import Recipe

RUN = Path("run")
TRAINED_MODEL = ("Compress.pretrained", "Model.pretrained")
EVALUATED_MODEL = ("Engine.save_load.ckpt_dir", "Compress.pretrained")
DATA = ("Data.Train.dataset.input_dir", "Data.Eval.dataset.input_dir")
OUTPUT = ("Engine.save_load.output_dir",)
"""Keys of a recipe that name a command's model, data set and output, in order of precedence."""

Located = TypeVar("Located", Path, Path | None)

log = logging.getLogger("lathe")

# Of the outputs that are addresses. Typer gives a parser the text of its option and no context, so
# that of this process's one command is here.
_mirrors: list["Mirror"] = []

RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe", "-r", "--config", "-c", help="YAML file, or name of a built-in recipe."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override", "-o", metavar="KEY=VALUE", help="Override a setting; may be repeated."
    ),
]


def input_option(help: str) -> Any:
    """An option that takes the path or address of an input."""
    return typer.Option(help=help, parser=input_path, metavar="PATH")


def input_argument(help: str) -> Any:
    """An argument that takes the path or address of an input."""
    return typer.Argument(help=help, parser=input_path)


def model_argument(help: str) -> Any:
    """An argument that takes a model: a path, an address, or `hf://NAME` on the Hugging Face
    Hub."""
    return typer.Argument(help=f"{help} May be an address, or hf://NAME.", parser=model_path)


def output_option(help: str) -> Any:
    """An option that takes the path or address of an output."""
    return typer.Option(help=help, parser=_output_path, metavar="PATH")


# Click passes what the user has typed to a parser, and a default as it is declared: a Path.
def model_path(path: str | Path) -> Path:
    """The local path of a model: a path as it is, or the location of a downloaded one."""
    if not str(path).startswith("hf://"):
        return input_path(path)
    from lathe.model.folder import resolve

    return resolve(str(path))


def _output_path(given: str | Path) -> Path:
    path, mirror = output_path(given)
    if mirror:
        _mirrors.append(mirror)
    return path


PARSERS: dict[str, Callable[[str], Path]] = {
    "model": model_path,
    "init": model_path,
    "output": _output_path,
}
"""Parsers of paths, by parameter; the others are plain inputs."""


def upload_outputs(*_: object, **__: object) -> None:
    """Upload the outputs of a successful command to their addresses; with several nodes, only the
    first does."""
    while _mirrors:
        mirror = _mirrors.pop()
        if is_first_node():
            mirror.finish()


Data = Annotated[Path, input_option("Folder written by `lathe prepare`.")]


Model = Annotated[Path, model_argument("Folder with a checkpoint or Hugging Face model.")]
Output = Annotated[Path, output_option("Output folder.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TASK=FILE",
        help="Evaluation task and its JSONL file: multiple_choice=hellaswag.jsonl (HellaSwag's or "
        "ARC's format), exact_match=gsm8k.jsonl (prompts and answers), json_schema=replies.jsonl "
        "(prompts and JSON schemas), or instructions=ifeval.jsonl (IFEval's format); may be "
        "repeated.",
    ),
]
OutputBeside = Annotated[Path | None, output_option("Output folder.")]


def load(name: str, overrides: list[str] | None) -> "Recipe":
    """Load a recipe; imports pydantic only now."""
    from lathe_base.config.recipe import load_recipe

    return load_recipe(name, overrides or [])


def located(
    ctx: typer.Context, settings: "Recipe", name: str, value: Located, keys: tuple[str, ...]
) -> Located | Path:
    """The path of an option or argument: as given, else what the recipe says, else the default.

    Args:
        name: the parameter's name.
        value: its value, given or default.
        keys: the settings that may name it, in order of precedence.
    """
    from lathe_base.config.fleetx import location

    # PaddleFleetX's recipes name inputs and outputs.
    locations = [(key, path) for key in keys if (path := location(settings, key))]
    if not locations:
        return value
    key, path = locations[0]
    # Only this says whether the path was typed or is the default.
    source = ctx.get_parameter_source(name)
    if source is not None and source.name == "COMMANDLINE":
        if "RANK" not in os.environ and str(value) != str(Path(path)):
            log.warning("%s is used as %s, not %s of the recipe's %s", value, name, path, key)
        return value
    if "RANK" not in os.environ:
        log.info("%s: %s, from the recipe's %s", name, path, key)
    return PARSERS.get(name, input_path)(path)


def training_paths(
    ctx: typer.Context, settings: "Recipe", data: Path, output: Path
) -> tuple[Path, Path]:
    """Data set and output of a training; see `located`.

    Raises:
        UserError: it is to resume from another folder than its output.
    """
    data = located(ctx, settings, "data", data, DATA)
    output = located(ctx, settings, "output", output, OUTPUT)
    state = settings.Engine.save_load.ckpt_dir
    if state and Path(state) != output:
        raise UserError(
            f"Engine.save_load.ckpt_dir is {state}, but a training resumes from its own output "
            f"folder, {output}",
            "resume it with --output set to that folder; to start from a model's weights, use "
            "Compress.pretrained to prune or quantize it, or --init to train it",
            Code.CONFLICTING_OPTIONS,
        )
    return data, output


def parse_tasks(options: list[str] | None) -> list[tuple[str, Path]]:
    """Task and file of every `--task TASK=FILE`."""
    from lathe.evaluate.measure_model import parse_task

    return [parse_task(option) for option in options or []]


def as_options(overrides: list[str] | None) -> list[str]:
    """The overrides as options of another command line."""
    return [part for value in overrides or [] for part in ("-o", value)]


def beside(model: Path, suffix: str) -> Path:
    """The default output folder beside a model, `MODEL-SUFFIX`."""
    if not model.name:
        raise UserError(
            f"{model}: has no name to append -{suffix} to", "give --output", Code.MISSING_OPTION
        )
    return model.with_name(f"{model.name}-{suffix}")


def named_models(options: list[str]) -> list[tuple[str, Path]]:
    """Name and folder of every `[NAME=]FOLDER`; an existing folder whose name contains an equals
    sign counts as a folder."""
    models: dict[str, Path] = {}
    for text in options:
        name, equals, folder = text.partition("=")
        is_named = equals and name and "/" not in name and not Path(text).is_dir()
        path = input_path(folder if is_named else text)
        name = printable(name if is_named else path.name)
        if name in models:
            raise UserError(
                f"{printable(text)}: a second model named {name}",
                f"give it another name: {name}-2={path}",
                Code.DUPLICATE,
            )
        models[name] = path
    return list(models.items())
