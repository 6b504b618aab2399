"""Logs this process's step to MLflow, if the environment names a server."""

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kfp import dsl

from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import flat
from lathe_base.errors import StageError, UserError
from lathe_base.storage import fetch, is_remote
from lathe_base.tracking.runs import URI, Task, TrackedStep, open_step

TRACE = "train.jsonl"
SUFFIXES = {"system.HTML": ".html", "system.Artifact": ".json"}
"""File names of outputs that are files."""

TURN = re.compile(r"for-loop-\d+-iteration-\d+")
"""Name of the folder that KFP's local runner creates for a loop iteration."""

log = logging.getLogger("lathe")


class _Process:
    """The tracking state of this process.

    Attributes:
        step: its current step; None outside of `tracked`, and after the first error, so that an
            unavailable server neither fails a step nor delays it repeatedly.
    """

    step: TrackedStep | None = None

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """The result of an MLflow call; None, with a warning, if it fails."""
        try:
            return action(*arguments)
        except Exception as error:
            self.step = None
            hint = "; pip install 'lathe[tracking]'" if isinstance(error, ImportError) else ""
            log.warning("not logged to MLflow at %s: %s%s", os.environ.get(URI), error, hint)
            return None


_process = _Process()


@contextmanager
def tracked(recipe: str, settings: Recipe) -> Iterator[None]:
    """Log the arguments of `record` within the block to an MLflow run that ends with the block."""
    task = this_task() if os.environ.get(URI) else None
    if task:
        # The settings that are not the defaults, by `Group.key`.
        changed = flat(settings.model_dump(mode="json", exclude_defaults=True))
        parameters = {"recipe": recipe, **changed}
        _process.step = _process.attempt(open_step, task, parameters)
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    finally:
        if _process.step:
            _process.attempt(_process.step.end, status)
            _process.step = None


def record(metrics: Mapping[str, float], artifacts: Sequence[tuple[dsl.Artifact, str]]) -> None:
    """Log a step's figures, the curves of a training, and the outputs that are files.

    Args:
        artifacts: each with the address of its files.
    """
    if _process.step:
        _process.attempt(_record, _process.step, metrics, artifacts)


def _record(step: TrackedStep, metrics: Mapping[str, float], artifacts: Any) -> None:
    step.figures(metrics)
    with tempfile.TemporaryDirectory() as name:
        for artifact, address in artifacts:
            path, copy = Path(artifact.path), Path(name)
            if path.is_file():
                file = copy / f"{path.name}{SUFFIXES.get(artifact.schema_title, '')}"
                file.write_bytes(path.read_bytes())
                try:
                    step.file(file)
                except Exception as error:  # MLflow may keep files where this pod cannot write
                    log.warning("not logged to MLflow: %s: %s", file.name, error)
            elif (path / TRACE).is_file():
                step.curves(path / TRACE)
            elif is_remote(address) and (address != artifact.uri or not path.exists()):
                # Already in the store: a TrainJob wrote it there, or this pod has moved it.
                with suppress(UserError, StageError):  # not a training's
                    step.curves(fetch(f"{address}/{TRACE}", copy))


def this_task() -> Task | None:
    """The task that KFP's executor runs, derived from the addresses of its outputs, which end with
    pipeline, run, task, a random part, and the output; on one machine with run, task, output."""
    with suppress(ValueError, IndexError, KeyError, StopIteration):
        executor_input = json.loads(sys.argv[sys.argv.index("--executor_input") + 1])
        outputs = executor_input["outputs"]["artifacts"].values()
        parts = next(iter(outputs))["artifacts"][0]["uri"].split("/")
        if run := os.environ.get("KFP_RUN_ID"):
            at = parts.index(run)  # .../PIPELINE/RUN/TASK/...
            return Task(parts[at - 1], run, parts[at + 1])
        parts = below_root(parts)
        # The local runner names a run's folder PIPELINE-TIME.
        pipeline, _, when = parts[0].partition("-")
        return Task(pipeline, when, parts[-2])
    return None


def below_root(parts: Sequence[str]) -> Sequence[str]:
    """The parts of a path or address below the root: run, loop iterations, task and output."""
    run = os.environ.get("KFP_RUN_ID")
    if run in parts:
        return parts[parts.index(run) - 1 :]  # with the pipeline, and a part of Pipelines' own
    # RUN, any loop iterations, TASK, OUTPUT.
    first = len(parts) - 3
    while TURN.fullmatch(parts[first]):
        first -= 1
    return parts[first:]
