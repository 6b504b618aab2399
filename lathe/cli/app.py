"""The Typer application that the modules of this package add commands to, and its message for a
missing input."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lathe.cli.options import RUN, upload_outputs
from lathe_base import __version__
from lathe_base.errors import Code, UserError

WRITERS = {
    RUN / "data": ("lathe prepare", "prepare/data"),
    RUN / "dense": ("lathe pretrain", "pretrain/model"),
    RUN / "pruned": ("lathe prune", "prune/pruned"),
    RUN / "int8": ("lathe quantize", "quantize/quantized"),
    RUN / "int8-onnx": ("lathe export", "export-int8/exported"),
    RUN / "dense-eval": ("lathe evaluate run/dense", "evaluate-dense/evaluation"),
    RUN / "int8-eval": ("lathe evaluate", "evaluate-int8/evaluation"),
    RUN / "deploy": ("lathe deploy", "rehearse/deployed"),
    RUN / "deployed": ("make run", "rehearse/deployed"),
}
"""The default inputs of the commands, each with the command that writes it and the step output of
a pipeline run that has the same kind."""

MODULES = (
    "data", "training", "compression", "evaluation", "exporting", "serving", "releases",
    "provenance", "recipes", "network",
)  # fmt: skip
"""The modules that define commands."""

PANELS = {
    "Every day": ("prepare", "pretrain", "finetune", "prune", "quantize", "evaluate", "export"),
    "Serve": (
        *("deploy", "serve", "stop", "client", "playground", "generate", "bench-serve", "release"),
    ),
    "Choose and compare": (
        *("recipe", "plan", "all-reduce", "analyze", "compress", "gate", "report"),
    ),
    "Convert from and to other tools": (
        *("import", "import-paddle", "import-megatron", "export-paddle", "prove"),
    ),
    "Data in parts": ("tokenizer", "tokenize", "join", "blend"),
    "Provenance and documentation": (
        *("keygen", "sign", "verify", "rebuild", "certify-resume"),
        *("card", "bom", "sbom", "audit"),
    ),
}
"""The commands by task, in the order of `lathe --help`."""


class Verbs(TyperGroup):
    """The commands; a missing input becomes a UserError that says how to create it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            # Only about a default input that does not exist: all others have said all they can.
            path = Path(error.what.partition(": ")[0])
            if path not in WRITERS or path.exists():
                raise
            command, output = WRITERS[path]
            hint = f"make it with `{command}`, or {error.hint}"
            if folders := sorted(RUN.glob(f"*/*/{output}"), key=lambda made: made.stat().st_mtime):
                hint += f", such as {folders[-1]}"
            raise UserError(f"{path}: no such folder", hint, Code.NOT_FOUND) from None
        except typer.BadParameter as error:
            if error.message or error.param is None or error.ctx is None:
                raise  # a wrong value; a missing one has no message of its own
            param: Any = error.param
            verb: Any = error.ctx.command
            is_option = param.param_type_name == "option"
            name = param.opts[0] if is_option else param.metavar or param.name.upper()
            raise UserError(
                f"{error.ctx.command_path} needs {name}: {param.help}",
                f"for example: {verb.epilog.removeprefix('Example: ')}",
                Code.MISSING_OPTION,
            ) from None


app = typer.Typer(
    cls=Verbs,
    help="Train, prune, quantize, verify and serve GPT-2/3- and Llama-family language models.\n\nA "
    "typical sequence: prepare, pretrain, prune, analyze, quantize, evaluate, gate, export, "
    "deploy, client. Each command's default output under run/ is the next one's default "
    "input, so you can try them without options. Folders and files may be addresses, such as "
    "s3://bucket/run/data or file:///srv/run/data. Settings come from a recipe: `lathe "
    "recipe` lists them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=upload_outputs,
)


def print_version(is_asked: bool) -> None:
    """Print the version and exit, if it `is_asked` for."""
    if is_asked:
        typer.echo(f"lathe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before a command."""


def add_verbs() -> None:
    """Import the modules, each of which adds its commands to `app`, and order them by task."""
    for name in MODULES:
        import_module(f"lathe.cli.{name}")
    panels = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}
    order = list(panels)

    def verb(command: Any) -> str:
        name: str = command.name or command.callback.__name__
        return name

    for command in app.registered_commands:
        command.rich_help_panel = panels[verb(command)]
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]
    # Within a panel, Typer lists commands in the order in which they were registered.
    app.registered_commands.sort(key=lambda command: order.index(verb(command)))
