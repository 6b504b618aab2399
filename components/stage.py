"""What every component does round its stage: plain logs, the recipe, errors, figures."""

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kfp import dsl

from lathe.errors import StageError, UserError
from lathe.launch.start import start_workers
from lathe.recipe import load_recipe
from lathe.settings import Recipe

MARK = "[lathe] "
"""Opens every line that is Lathe's own, so that a reader can pick it out of KFP's."""

ERROR = "error: "


class _MarkEveryLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(MARK + line for line in super().format(record).splitlines())


@contextmanager
def stage(recipe: str, overrides: Sequence[str]) -> Iterator[Recipe]:
    """Yield the recipe; a mistake of the user ends the process with its message and status 2."""
    log = logging.getLogger("lathe")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_MarkEveryLine())
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    try:
        yield load_recipe(recipe, overrides)
    except (UserError, StageError) as error:
        for line in str(error).splitlines():
            log.error("%s%s", ERROR, line)
        raise SystemExit(error.status) from error


def train_in_workers(
    recipe: str, overrides: Sequence[str], settings: Recipe, *command: object
) -> None:
    """Run a training verb of the command line in the processes that the recipe asks for.

    Does nothing where one process is enough. Calling the stage afterwards does the work in the
    one case, and finds it done in the other.
    """
    options = ["--recipe", recipe, *(part for value in overrides for part in ("-o", value))]
    start_workers([*map(str, command), *options], settings)


def paths(*artifacts: dsl.Artifact | None) -> list[Path | None]:
    """Where the artifacts are; None for an optional input that was not given."""
    return [Path(artifact.path) if artifact else None for artifact in artifacts]


def record(result: Any, metrics: dsl.Metrics, *artifacts: dsl.Artifact) -> None:
    """Log the numbers of a result (a dataclass or a dict) as metrics and as metadata.

    The metrics file is written too: an artifact without a file never hits KFP's cache.
    """
    figures = _figures(result if isinstance(result, dict) else asdict(result))
    for name, value in figures.items():
        metrics.log_metric(name, value)
    Path(metrics.path).write_text(json.dumps(figures, indent=2))
    for artifact in artifacts:
        artifact.metadata.update(figures)


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
    return {k: v for k, v in numbers.items() if math.isfinite(v)}
