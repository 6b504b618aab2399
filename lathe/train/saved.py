"""The saved states of a run: where they are, and whether one is intact.

`state/step_00000200/` holds the tensors of every process and, written last, `trainer.json` with the
size and SHA-256 of each file and of itself. States of earlier versions list only the sizes.
"""

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lathe_base.artifacts.kinds import checked
from lathe_base.artifacts.kinds import read_metadata as read_saved
from lathe_base.artifacts.metadata import Count, FileName, Metadata, Sha256
from lathe_base.errors import UserError
from lathe_base.storage import digest, sha256

STEP = re.compile(r"step_(\d{8})")
METADATA = "trainer.json"
METADATA_DIGEST = "metadata_sha256"
"""Key of the digest of all other values of the metadata."""

PARTIAL = ".partial"
HASHING_THREADS = 8
HINT = "delete the folder: the run then resumes from the checkpoint before it"

T = TypeVar("T")


def step_name(step: int) -> str:
    """The folder name of a saved state."""
    return f"step_{step:08d}"


def committed_steps(folder: Path) -> list[Path]:
    """Saved states, oldest first; on a node with its own disk, its part of them."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


class SavedMetadata(Metadata):
    """`trainer.json`; a loss that could not be measured is NaN."""

    HAS_NAN = True
    files: dict[FileName, Count]
    sha256: dict[FileName, Sha256] | None = None
    metadata_sha256: Sha256 | None = None
    progress: dict[str, Any]
    loss_scale: dict[str, Any]


def read_metadata(path: Path) -> dict[str, Any]:
    """The `extra` of a save.

    Raises:
        UserError: it is broken.
    """
    return read_saved(path / METADATA, SavedMetadata, HINT).raw


def restored(path: Path, values: Any, kind: type[T]) -> T:
    """A part of a metadata file as the object that was saved; raises as `read_metadata` does."""
    return checked(values, kind, str(path / METADATA), HINT)


def write_metadata(
    path: Path, extra: dict[str, Any], sizes: dict[str, int], digests: dict[str, str]
) -> None:
    """Write the metadata of a state; sizes (bytes) and digests by file name."""
    values = {**extra, "files": sizes, "sha256": digests}
    text = json.dumps({**values, METADATA_DIGEST: digest(json.dumps(values))})
    (path / METADATA).write_text(text, encoding="utf-8")


def compute_digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files by name, computed in several threads."""
    paths = sorted(files)
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return {
            path.name: value for path, value in zip(paths, pool.map(sha256, paths), strict=True)
        }


def damage(path: Path) -> str:
    """What is wrong with a saved state, for a message; empty if it is intact. Reads all its files
    if their digests are known."""
    try:
        metadata = read_metadata(path)
        expected = metadata.pop(METADATA_DIGEST, None)
        if expected not in (None, digest(json.dumps(metadata))):
            return f"{METADATA} differs from its SHA-256"
        sizes = metadata["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
        if broken:
            return f"{', '.join(broken)}: not the size that {METADATA} lists"
        listed = metadata.get("sha256") or {}
        found = compute_digests(path / name for name in listed)
    except OSError as error:
        return str(error)
    except UserError as error:
        return error.what
    changed = [name for name, value in listed.items() if found[name] != value]
    return f"{', '.join(changed)}: not the SHA-256 that {METADATA} lists" if changed else ""
