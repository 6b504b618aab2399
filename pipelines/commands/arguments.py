"""What every command has: a pipeline's arguments as command-line options and their validation,
messages in place of tracebacks, and a console for wide tables."""

import functools
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from lathe_base.checks import Finding
from lathe_base.errors import EXPECTED_ERRORS, Code, UserError, coded, explain
from pipelines.compiler.compile import ENGINE, FUNCTIONS, MACHINES, built, defaults, takes_chats

SHARDS = "Launch.shards"
WEIGHT_BITS = "Compress.Quantization.weight_bits"
TASKS = "Offline_Eval.tasks"
OPTIONS = {
    "corpus": "Training text: a file, folder, address, or newest:PLACE.",
    "chat": "Conversations to finetune the model on, in `qat` and `full`, in place of a corpus.",
    "tokenizer": "Tokenizer file or folder.",
    "model": "Checkpoint folder to start from.",
    "cloze": "LAMBADA-format file to evaluate on.",
    "recipe": "Name or path of the pipeline's recipe.",
    "prune_recipe": "Pruning recipe, in `full` and `compress`.",
    "qat_recipe": "Quantization recipe, in `full` and `compress`.",
    "finetune_recipe": "Recipe that finetunes on the conversations, in `qat`.",
    "target": "Target of `compress`: latency=0.5.",
    "budget": "Budget of `compress`: perplexity=0.05.",
    "trials": "Maximum number of designs that `compress` trains.",
    "kills": "Number of kills to certify resuming, in `pretrain`: 20.",
    "production": "Location of releases, s3://bucket/prefix, to go live, in `qat` and `full`.",
}
KINDS: dict[str, type] = {"kills": int, "trials": int}
"""Types of the options that are not strings."""
Pipeline = Annotated[str, typer.Argument(help=f"One of: {', '.join(FUNCTIONS)}.")]
Engine = Annotated[str, typer.Option(help=f"torch or paddle: short for -o {ENGINE}=...")]
Quant = Annotated[
    str,
    typer.Option(help=f"int8 or int4: short for -o {WEIGHT_BITS}=..., in pipelines that quantize."),
]
Shards = Annotated[
    int | None,
    typer.Option(help=f"Number of parallel tokenization steps: short for -o {SHARDS}=..."),
]
Tasks = Annotated[
    list[str],
    typer.Option(
        metavar="TASK=FILE",
        help=f"Evaluation task and its file: short for -o {TASKS}=[...]; may be repeated.",
    ),
]
Overrides = Annotated[
    list[str], typer.Option("-o", "--override", help="Group.key=value; may be repeated.")
]
MACHINE_OPTIONS = [
    inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[type(default) | None, typer.Option(help=text)],
    )
    for key, (default, text) in MACHINES.items()
]
"""Parameters of a command with an option for each of `MACHINES`; None unless it is given."""


def takes_arguments(function: Callable[..., None]) -> Callable[..., None]:
    """Make `function(pipeline, arguments, **own)` a command with an option for every argument.

    `arguments` contains `overrides` and the arguments that were given or that depend on the engine;
    the others keep the pipeline's defaults.
    """

    @functools.wraps(function)
    def command(
        pipeline: str,
        engine: str,
        quant: str,
        shards: int | None,
        task: list[str],
        overrides: list[str],
        **options: Any,
    ) -> None:
        values = {key: options.pop(key) for key in OPTIONS}
        chosen = {key: value for key, value in values.items() if value}
        # Last, so that they win over an override of the same setting.
        if engine:
            overrides = [*overrides, f"{ENGINE}={engine}"]
        if quant:
            overrides = [*overrides, f"{WEIGHT_BITS}={quant.removeprefix('int')}"]
        if shards is not None:
            overrides = [*overrides, f"{SHARDS}={shards}"]
        if task:
            overrides = [*overrides, f"{TASKS}={json.dumps(task)}"]
        arguments = defaults(pipeline, overrides) | chosen | {"overrides": overrides}
        function(pipeline, arguments, **options)

    def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=default, annotation=kind)

    others = list(inspect.signature(function).parameters.values())[2:]
    parameters = [
        parameter("pipeline", Pipeline, "full"),
        *(
            parameter(key, Annotated[kind, typer.Option(help=text)], kind())
            for key, text in OPTIONS.items()
            for kind in [KINDS.get(key, str)]
        ),
        parameter("engine", Engine, ""),
        parameter("quant", Quant, ""),
        parameter("shards", Shards, None),
        parameter("task", Tasks, []),
        parameter("overrides", Overrides, []),
        *(parameter(p.name, p.annotation, p.default) for p in others),
    ]
    # Typer reads a command's options from its signature, and their types from the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def takes_machines(function: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each of `MACHINES` to a command `function(pipeline, arguments, **own)`,
    which gets those that were given among the arguments."""

    @functools.wraps(function)
    def command(pipeline: str, arguments: dict[str, Any], **options: Any) -> None:
        function(pipeline, arguments | given_machines(options), **options)

    first, second, *extra = inspect.signature(function).parameters.values()
    extra = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in extra]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, second, *MACHINE_OPTIONS, *extra]
    )
    return command


def given_machines(options: dict[str, Any]) -> dict[str, Any]:
    """Remove those of `MACHINES` from a command's options; returns the ones that were given."""
    machines = {key: options.pop(key) for key in MACHINES}
    return {key: value for key, value in machines.items() if value is not None}


def wrong_names(name: str, arguments: dict[str, Any]) -> Iterator[Finding]:
    """Find an unknown pipeline, each unknown argument and each missing one."""
    wrong = functools.partial(Finding, "arguments", "broken")
    if name not in FUNCTIONS:
        hint = f"choose one of: {', '.join(FUNCTIONS)}"
        yield wrong(f"unknown pipeline {name}", hint, Code.UNKNOWN_NAME)
        return
    has_chats = bool(arguments.get("chat"))
    if has_chats and takes_chats(name) and "corpus" in arguments:
        hint = "give either CORPUS= (--corpus) or CHAT= (--chat)"
        yield wrong("a corpus and conversations", hint, Code.CONFLICTING_OPTIONS)
        return
    inputs = built(name, has_chats).component_spec.inputs
    for key in arguments.keys() - inputs.keys():
        cure = f"it has: {', '.join(inputs)}"
        if takes_chats(name) and key == "finetune_recipe":
            cure = "it needs conversations: give CHAT= (--chat)"
        yield wrong(f"pipeline {name} has no {key}", cure, Code.UNKNOWN_KEY)
    for key, spec in inputs.items():
        if not spec.optional and key not in arguments:
            yield wrong(
                f"pipeline {name} needs a {key}",
                f"give --{key} (make: {key.upper()}=...), such as the one `make run "
                "PIPELINE=pretrain` writes",
                Code.MISSING_OPTION,
            )


def argument(name: str, key: str) -> Any:
    """Default of a pipeline's argument; None if there is no default or no such argument."""
    inputs = built(name).component_spec.inputs
    return inputs[key].default if key in inputs else None


def recipe_names(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The recipes that a pipeline reads, by argument."""
    inputs = built(name, bool(arguments.get("chat"))).component_spec.inputs
    keys = [key for key in inputs if key.endswith("recipe")]
    return {key: arguments.get(key, inputs[key].default) for key in keys}


@contextmanager
def error_messages() -> Iterator[None]:
    """Exit with a message, not a traceback, for the expected errors that the block raises."""
    try:
        yield
    except ExceptionGroup as group:
        errors = [error for error in group.exceptions if isinstance(error, EXPECTED_ERRORS)]
        fail("\n".join(coded(explain(error)) for error in errors), UserError.status)
    except EXPECTED_ERRORS as error:
        told = explain(error)
        fail(coded(told), told.status)


def fail(message: str, status: int) -> NoReturn:
    """Exit with a message on stderr."""
    print(message, file=sys.stderr)
    raise SystemExit(status)


def wide_console(columns: int = 100) -> Console:
    """Standard output with at least `columns` columns, for tables wider than the terminal."""
    return Console(width=max(columns, shutil.get_terminal_size().columns), highlight=False)
