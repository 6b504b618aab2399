"""Run one pipeline with KFP's local runner, each stage as a subprocess of this Python.

`pipelines.local.run` starts it as `python -m pipelines.local.runner NAME ROOT CACHE SHARDS INPUTS
ARGUMENTS`, where the last two are JSON.

Finished tasks are cached. KFP's own key consists of the text of a component and its arguments. Here
it consists of what they stand for: Lathe's code, the installed packages, the settings that the
component declares to read, and the contents of the inputs.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kfp import dsl, local
from kfp.local import cache as kfp_cache
from kfp.local import subprocess_task_handler as kfp_subprocess
from kfp.local.cache import LocalCache
from pydantic import BaseModel

from components.step import FUNCTION, component
from lathe.backends.paddle_process import PYTHON_VARIABLE as PADDLE
from lathe.data.run_inputs import content
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.provenance.surroundings import PIPELINE
from lathe_base.storage import atomic_file, digest, is_remote, sha256
from lathe_base.storage.objects import unknown
from lathe_launch.parent import tied
from lathe_serving.environment import PYTHON_VARIABLE as SERVE
from pipelines.compiler.compile import REPOSITORY, build, code_digest, named
from pipelines.local.log import DONE_AGAIN, FIRST
from pipelines.steps.resources import Variant

SERVED = ("deploy", "release")
"""Components that start Triton, which has an environment of its own."""
METADATA_SUFFIX = ".made"


def run(
    name: str,
    root: str,
    cache_root: str,
    shards: int,
    inputs: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """Run pipeline `name`, with outputs in `root` and finished tasks cached in `cache_root`.

    Args:
        inputs: what the component `inputs` would return: `lathe.data.run_inputs.RunInputs`, and
            `components.plan.plan`.

    Raises:
        RuntimeError: a task failed.
    """
    # KFP warns of images without "python" in their names and of accelerators in local runs.
    warnings.filterwarnings("ignore", module="kfp")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    has_chats = bool(arguments.get("chat"))
    pipeline = build(name, Variant(shards=shards, inputs=inputs, has_chats=has_chats))
    os.environ[PIPELINE] = named(name, pipeline)
    spec = pipeline.component_spec.implementation.graph  # with sub-pipelines
    for dag in [spec.root, *spec.components.values()]:
        for task in dag.dag.tasks.values():
            # Retries are for flaky nodes; here they would only delay the error.
            task.ClearField("retry_policy")
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        enable_caching=True,
        cache_root=cache_root,
    )
    # KFP has options for neither keys that depend on contents nor steps that end with this process.
    kfp_cache.LocalCache = CheckedCache
    run_subprocess = kfp_subprocess.run_local_subprocess

    def run_tied(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        return int(run_subprocess(tied(full_command), env_vars))

    kfp_subprocess.run_local_subprocess = run_tied
    pipeline(**arguments)


class EntryMetadata(BaseModel):
    """Metadata of a cache entry.

    Attributes:
        task: name of the task.
        parts: parts of its key.
        entry: SHA-256 of the entry.
        files: every local file that the task wrote -> its length (bytes) and modification time
            (ns).
        stored: address of every artifact in a store -> its content identifier.
    """

    task: str
    parts: dict[str, str]
    entry: str
    files: dict[Path, tuple[int, int]]
    stored: dict[str, str]


class CheckedCache(LocalCache):
    """KFP's cache with keys that depend on contents and entries that become invalid when the task's
    outputs change."""

    def __init__(self, cache_root: str) -> None:
        super().__init__(cache_root)
        self._asked: dict[str, tuple[str, dict[str, str]]] = {}

    def compute_key(
        self,
        component_name: str,
        image: str,
        full_command: list[str],
        arguments: dict[str, Any],
        env_vars: dict[str, str] | None = None,
        custom_cache_key: str | None = None,
    ) -> str:
        """Digest of the task's name and the parts of its key, which `get` and `put` need."""
        function = full_command[full_command.index(FUNCTION) + 1]
        task = component_name.removeprefix("comp-")
        parts = key_parts(function, arguments)
        parts |= {f"variable {name}": value for name, value in (env_vars or {}).items()}
        key = digest(json.dumps([task, sorted(parts.items())]))
        self._asked[key] = task, parts
        return key

    def get(self, key: str) -> dict[str, Any] | None:
        """The outputs of a finished task; None, with the reason in the log, if it has to run."""
        task, parts = self._asked[key]
        entry = Path(self._entry_path(key))
        if entry.exists():
            if damage := _damage(entry):
                logging.info("Task %s %s: %s", task, DONE_AGAIN, damage)
                return None
            outputs: dict[str, Any] | None = super().get(key)
            return outputs
        # The parts that have changed since the most similar run of this task.
        paths = Path(self.cache_root).glob(f"*{METADATA_SUFFIX}")
        changes = [
            sorted(name for name in {*old.parts, *parts} if old.parts.get(name) != parts.get(name))
            for path in paths
            if (old := _read_metadata(path)) and old.task == task
        ]
        if changes:
            fewest = min(changes, key=len)
            logging.info("Task %s %s: changed: %s", task, DONE_AGAIN, ", ".join(fewest))
        else:
            logging.info("Task %s %s", task, FIRST)
        return None

    def put(self, key: str, outputs: dict[str, Any]) -> None:
        # The metadata comes last: an entry without it counts as corrupt.
        super().put(key, outputs)
        entry = Path(self._entry_path(key))
        task, parts = self._asked[key]
        files, stored = dict[Path, tuple[int, int]](), dict[str, str]()
        values = [
            value
            for output in outputs.values()
            for value in (output if isinstance(output, list) else [output])
        ]
        for artifact in (value for value in values if isinstance(value, dsl.Artifact)):
            if is_remote(artifact.uri):
                stored[artifact.uri] = content(artifact.uri)
                continue
            path = Path(artifact.uri)
            below = path.rglob("*") if path.is_dir() else [path]
            files |= {p: _stamp(p) for p in below if p.is_file() and not p.name.startswith(".")}
        metadata = EntryMetadata(
            task=task, parts=parts, entry=sha256(entry), files=files, stored=stored
        )
        with atomic_file(entry.with_suffix(METADATA_SUFFIX)) as work:
            work.write_text(metadata.model_dump_json(), encoding="utf-8")


def key_parts(name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a task's cache key, by readable names.

    Args:
        name: of its component.
        arguments: the component's arguments, as KFP passes them.
    """
    # By group, so that the log can name the one that has changed.
    settings = {key: load_recipe(arguments[key]) for key in arguments if key.endswith("recipe")}
    parts = {"code": code_digest(), "packages": packages_digest(name, settings["recipe"])}
    for key, recipe in settings.items():
        groups = recipe.model_dump(mode="json").items()
        parts |= {f"{key} {g}": digest(json.dumps(v, sort_keys=True)) for g, v in groups}
    contents = arguments.get("contents", {}).items()
    parts |= {f"contents of {source}": identity for source, identity in contents}
    # Overrides are in the recipes already.
    rest = arguments.keys() - settings.keys() - {"contents", "overrides"}
    return parts | {f"input {key}": _identity(arguments[key]) for key in rest}


def packages_digest(name: str, settings: Recipe) -> str:
    """Digest of this Python's version and the names and versions of all packages in its environment
    and in the environments that a component's step starts processes in."""
    folders = tuple(path for path in sys.path if path.endswith("site-packages"))
    lines = [sys.version, _names(folders)]
    started = [(SERVE, ".venv-serve")] * (name in SERVED)
    if component(name).step.by_engine and settings.Compress.engine == "paddle":
        started.append((PADDLE, ".venv-paddle"))
    for variable, beside in started:
        python = Path(os.environ.get(variable) or REPOSITORY / beside / "bin" / "python")
        packages = sorted(python.parent.parent.glob("lib/python*/site-packages"))
        lines.append(_names(tuple(map(str, packages))))
    return digest(json.dumps(lines))


@cache
def _names(folders: tuple[str, ...]) -> list[str]:
    return sorted(
        name
        for folder in folders
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if name.endswith((".dist-info", ".egg-info"))
    )


def _identity(value: Any) -> str:
    """Identifier of an argument: of an artifact's contents and metadata, otherwise of its text."""
    if isinstance(value, list | tuple):
        return digest(json.dumps([_identity(part) for part in value]))
    if not isinstance(value, dsl.Artifact):
        return digest(json.dumps(value, sort_keys=True, default=str))
    try:
        identity = content(value.uri)
    except UserError:  # the task will report it
        identity = unknown()
    return digest(json.dumps([value.schema_title, identity, value.metadata], default=str))


def _read_metadata(path: Path) -> EntryMetadata | None:
    try:
        return EntryMetadata.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _damage(entry: Path) -> str | None:
    """The first output that has changed since the task wrote it, or None."""
    metadata = _read_metadata(entry.with_suffix(METADATA_SUFFIX))
    try:
        if metadata is None or sha256(entry) != metadata.entry:
            return f"{entry} is corrupt"
    except OSError:
        return f"{entry} is corrupt"
    # Length and time only: models are too large to be read at every start.
    for path, stamp in metadata.files.items():
        try:
            if _stamp(path) != stamp:
                return f"{path} has changed"
        except OSError:
            return f"{path} is missing"
    for address, seen in metadata.stored.items():
        try:
            if content(address) != seen:
                return f"{address} has changed"
        except UserError as error:
            return str(error.what)
    return None


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


if __name__ == "__main__":
    name, root, folder, shards, inputs, arguments = sys.argv[1:]
    run(name, root, folder, int(shards), json.loads(inputs), json.loads(arguments))
