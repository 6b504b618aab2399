"""The Typer application that every group of verbs adds to."""

from importlib import import_module

import typer

from lathe.cli.missing import Verbs
from lathe.cli.options import upload_outputs

app = typer.Typer(
    cls=Verbs,
    help="Train, prune, quantize, prove and serve GPT-2/3-family language models.\n\n"
    "The verbs in their order: prepare, pretrain, prune, analyze, quantize, evaluate, gate, "
    "export, deploy, client. Their defaults follow on each other under run/, so that each can be "
    "tried without an option. Folders and files may be addresses, as s3://bucket/run/data "
    "or file:///srv/run/data. Settings come from a recipe: `lathe recipe` lists them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=upload_outputs,
)

VERBS = (
    "data", "training", "certifying", "compression", "evaluation", "exporting", "serving",
    "releases", "provenance", "cards", "recipes",
)  # fmt: skip
"""The modules of this package that have verbs, in the order of `lathe --help`."""


def add_verbs() -> None:
    """Import them: each adds its own to `app`."""
    for name in VERBS:
        import_module(f"lathe.cli.{name}")
