"""The cache of finished tasks of local runs, which checks that their outputs are unchanged."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local.cache import LocalCache
from pydantic import BaseModel

from lathe.storage import atomic_file, is_remote, sha256

DONE_AGAIN = "is done again"


class Made(BaseModel):
    """Stored with a cache entry: its digest, and the length (bytes) and modification time (ns) of
    every local file that the task wrote."""

    entry: str
    files: dict[Path, tuple[int, int]]


class CheckedCache(LocalCache):
    """KFP's cache, with entries that are valid only while the task's outputs are unchanged."""

    def __init__(self, cache_root: str) -> None:
        super().__init__(cache_root)
        self._names: dict[str, str] = {}

    def compute_key(self, component_name: str, *args: Any, **kwargs: Any) -> str:
        key = str(super().compute_key(component_name, *args, **kwargs))
        self._names[key] = component_name.removeprefix("comp-")
        return key

    def get(self, key: str) -> dict[str, Any] | None:
        """The outputs of a finished task; None if it has to run again."""
        entry = Path(self._entry_path(key))
        if not entry.exists():
            return None
        reason = _damage(entry)
        if reason is None:
            outputs: dict[str, Any] | None = super().get(key)
            return outputs
        logging.info("Task %s %s: %s", self._names[key], DONE_AGAIN, reason)
        return None

    def put(self, key: str, outputs: dict[str, Any]) -> None:
        super().put(key, outputs)
        entry = Path(self._entry_path(key))
        made = Made(entry=sha256(entry), files={p: _stamp(p) for p in _files(outputs)})
        with atomic_file(_beside(entry)) as work:
            work.write_text(made.model_dump_json(), encoding="utf-8")


def _damage(entry: Path) -> str | None:
    """The first output that has changed since the task wrote it, or None."""
    try:
        made = Made.model_validate_json(_beside(entry).read_bytes())
        if sha256(entry) != made.entry:
            return f"{entry} is damaged"
    except (OSError, ValueError):
        return f"{entry} is damaged"
    for path, stamp in made.files.items():
        try:
            if _stamp(path) != stamp:
                return f"{path} has changed"
        except OSError:
            return f"{path} is missing"
    return None


def _beside(entry: Path) -> Path:
    return entry.with_suffix(".made")


def _files(outputs: dict[str, Any]) -> Iterator[Path]:
    """The local files of all artifacts, without hidden ones."""
    for output in outputs.values():
        for artifact in output if isinstance(output, list) else [output]:
            if isinstance(artifact, dsl.Artifact) and not is_remote(artifact.uri):
                path = Path(artifact.uri)
                below = path.rglob("*") if path.is_dir() else [path]
                yield from (p for p in below if p.is_file() and not p.name.startswith("."))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
