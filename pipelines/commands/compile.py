"""Write the compiled pipelines, for `make compile` and `make manifests`.

    python -m pipelines.commands.compile yaml build
    python -m pipelines.commands.compile objects build/manifests/pipelines.yaml --gpus 0

The options are the defaults of the parameters of the same names, with which runs start where nobody
changes them: in the UI, by a schedule, or from a GitOps repository.
"""

import functools
import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from components.machines import Pool
from lathe_base.config.recipe import load_recipe
from pipelines.commands.arguments import MACHINE_OPTIONS, error_messages, given_machines
from pipelines.compiler import objects
from pipelines.compiler.compile import REPOSITORY, code_digest, write
from pipelines.steps.resources import Variant

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Write the compiled pipelines."
)


def takes_defaults(function: Callable[[Path, Variant], None]) -> Callable[..., None]:
    """Make `function(path, variant)` a command with an option for each of `MACHINES`."""

    @functools.wraps(function)
    def command(**options: Any) -> None:
        machines = given_machines(options)
        (path,) = options.values()
        with error_messages():
            load_recipe("base", Pool.from_arguments(machines).overrides)  # validates them
            function(path, Variant(code=code_digest(), machines=machines))

    first = next(iter(inspect.signature(function).parameters.values()))
    command.__signature__ = inspect.Signature([first, *MACHINE_OPTIONS])  # type: ignore[attr-defined]
    return command


@app.command("yaml")
@takes_defaults
def write_yaml(folder: Path, variant: Variant) -> None:
    """Write every pipeline's IR YAML to a folder."""
    for path in write(folder, variant):
        print(path)


@app.command("objects")
@takes_defaults
def write_objects(file: Path, variant: Variant) -> None:
    """Write the pipelines as Kubernetes objects to a file; their version is the commit."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    objects.write(file, done.stdout.strip(), variant)


if __name__ == "__main__":
    app()
