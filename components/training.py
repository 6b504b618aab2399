"""Training in a component: in its own process, in several processes, or as a TrainJob."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kfp import dsl

from components.artifacts import copy, local, output_address, resolve_pointer, write_pointer
from components.machines import starts_trainjob
from lathe import backends
from lathe.model.folder import MARKER
from lathe.report.training import checkpoint_metadata, training_page
from lathe.train.result import SAMPLES
from lathe.train.trace import TRACE
from lathe_base.artifacts.mirror import Mirror
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.storage import fetch, is_remote
from lathe_launch.shape import required_shape


def train(
    settings: Recipe,
    command: Sequence[object],
    output: dsl.Model,
    page: dsl.HTML,
    stage: Callable[[], object],
) -> dict[str, Any]:
    """Run a training command in the processes that the recipe requires.

    Args:
        command: the command and its options; artifacts are replaced by their folders or, for a
            TrainJob, which shares no disk with this pod, by their addresses.
        output: the checkpoint. If it has an address, its saved states are stored next to it, so
            that a retry on another machine resumes.
        page: shows the loss curve.
        stage: does the same work in this process, if one is enough.

    Returns:
        The figures of the finished checkpoint, and what the workers of a TrainJob have used.
    """
    address = output_address(output) if "KFP_RUN_ID" in os.environ else output.uri
    if "KUBERNETES_SERVICE_HOST" in os.environ and starts_trainjob(settings.Launch):
        from lathe_launch.cluster.trainjob import run

        machines = settings.Launch.of_step(str(command[0]))
        backend = backends.of(settings)
        if backend.starts_processes(str(command[0])):
            backend.check_environment()  # the pods have this pod's image
            runtime = machines.runtime or backend.TRAINJOB_RUNTIME
            machines = machines.model_copy(update={"runtime": runtime})
        arguments = [address if part is output else _address(part) for part in command]
        used = run(arguments, required_shape(settings), machines)
        # The pods have written the checkpoint: for its figures, a few files of it suffice here.
        write_pointer(output, address)
        with tempfile.TemporaryDirectory() as folder:
            fetch(f"{address}/{MARKER}", Path(folder))
            written = {TRACE, *checkpoint_metadata(Path(folder)).get("files", {})}
            for name in sorted({TRACE, SAMPLES} & written):
                fetch(f"{address}/{name}", Path(folder))
            return _finish(Path(folder), page) | used.figures
    # In this pod. Saved states go to the store as they are made, and a retry gets them from there.
    mirror, path = None, Path(output.path)
    if is_remote(address):
        mirror = Mirror.make(path, address)
        mirror.restore()
    arguments = [str(path) if part is output else _path(part) for part in command]
    # One process is this one: `stage` then does the work.
    if not backends.start_workers(arguments, settings):
        stage()
    metrics = _finish(path, page)
    if mirror:
        mirror.finish()
        shutil.rmtree(path)  # KFP has nothing left to upload
        write_pointer(output, address)
    return metrics


def copy_checkpoint(source: dsl.Model, output: dsl.Model, page: dsl.HTML) -> dict[str, Any]:
    """Copy a checkpoint that needs no training; returns its figures."""
    copy(source, output)
    training_page(Path(output.path), Path(page.path))
    metrics: dict[str, Any] = checkpoint_metadata(Path(output.path)).get("metrics", {})
    return metrics


def _finish(checkpoint: Path, page: dsl.HTML) -> dict[str, Any]:
    training_page(checkpoint, Path(page.path))
    marker = (checkpoint / MARKER).read_text(encoding="utf-8")
    metrics: dict[str, Any] = json.loads(marker)["metrics"]
    return metrics


def _address(part: object) -> str:
    if isinstance(part, dsl.Artifact):
        if not is_remote(address := resolve_pointer(part)):
            raise UserError(
                f"{part.name}: {address} is not an address, and a TrainJob's pods do not share a "
                f"disk",
                "run the pipeline with a pipeline root in an object store, or on a volume (ROOT=)",
                Code.BAD_PATH,
            )
        return address
    return str(part)


def _path(part: object) -> str:
    return str(*local(part)) if isinstance(part, dsl.Artifact) else str(part)
