"""The cache of finished tasks of local runs: its keys, and checks of its entries.

KFP's own key consists of the text of a component and its arguments. Here it consists of what they
stand for: Lathe's code, the installed packages, the settings that the component declares to read,
and the contents of the inputs.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local.cache import LocalCache
from pydantic import BaseModel

from components.step import FUNCTION, component
from lathe.backends.paddle_process import PYTHON_VARIABLE as PADDLE
from lathe.data.run_inputs import content
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.storage import atomic_file, digest, is_remote, sha256
from lathe_base.storage.objects import unknown
from lathe_serving.environment import PYTHON_VARIABLE as SERVE
from pipelines.compiler.code import REPOSITORY, code_digest

DONE_AGAIN = "runs again"
FIRST = "runs for the first time"

SERVED = ("deploy", "release")
"""Components that start Triton, which has an environment of its own."""


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
        reason = _damage(entry) if entry.exists() else self._difference(task, parts)
        if reason:
            logging.info("Task %s %s: %s", task, DONE_AGAIN, reason)
            return None
        if not entry.exists():
            logging.info("Task %s %s", task, FIRST)
            return None
        outputs: dict[str, Any] | None = super().get(key)
        return outputs

    def put(self, key: str, outputs: dict[str, Any]) -> None:
        super().put(key, outputs)
        entry = Path(self._entry_path(key))
        task, parts = self._asked[key]
        files, stored = dict[Path, tuple[int, int]](), dict[str, str]()
        for artifact in _artifacts(outputs):
            if is_remote(artifact.uri):
                stored[artifact.uri] = content(artifact.uri)
                continue
            path = Path(artifact.uri)
            below = path.rglob("*") if path.is_dir() else [path]
            files |= {p: _stamp(p) for p in below if p.is_file() and not p.name.startswith(".")}
        metadata = EntryMetadata(
            task=task, parts=parts, entry=sha256(entry), files=files, stored=stored
        )
        with atomic_file(_metadata_path(entry)) as work:
            work.write_text(metadata.model_dump_json(), encoding="utf-8")

    def _difference(self, task: str, parts: Mapping[str, str]) -> str | None:
        """The changed parts since the most similar run of this task; None if it never ran."""
        identities = [_read_metadata(path) for path in Path(self.cache_root).glob("*.made")]
        changes = [
            sorted(name for name in {*old.parts, *parts} if old.parts.get(name) != parts.get(name))
            for old in identities
            if old and old.task == task
        ]
        if not changes:
            return None
        fewest = min(changes, key=len)
        return f"changed: {', '.join(fewest)}"


def key_parts(name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a task's cache key, by readable names.

    Args:
        name: of its component.
        arguments: the component's arguments, as KFP passes them.
    """
    settings = {key: load_recipe(arguments[key]) for key in arguments if key.endswith("recipe")}
    parts = {"code": code_digest(), "packages": packages_digest(name, settings["recipe"])}
    for key, recipe in settings.items():
        groups = recipe.model_dump(mode="json").items()
        parts |= {f"{key} {g}": digest(json.dumps(v, sort_keys=True)) for g, v in groups}
    contents = arguments.get("contents", {}).items()
    parts |= {f"contents of {source}": identity for source, identity in contents}
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
    metadata = _read_metadata(_metadata_path(entry))
    try:
        if metadata is None or sha256(entry) != metadata.entry:
            return f"{entry} is corrupt"
    except OSError:
        return f"{entry} is corrupt"
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


def _metadata_path(entry: Path) -> Path:
    return entry.with_suffix(".made")


def _artifacts(outputs: dict[str, Any]) -> Iterator[dsl.Artifact]:
    for output in outputs.values():
        for artifact in output if isinstance(output, list) else [output]:
            if isinstance(artifact, dsl.Artifact):
                yield artifact


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
