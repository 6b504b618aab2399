"""Finds the checkpoints of a run, and which of them are complete.

`state/step_00000200/` holds the tensors of every process and, written last, `trainer.json`.
"""

import logging
import re
from pathlib import Path
from typing import Any, TypeVar

from lathe_base.artifacts.kinds import checked
from lathe_base.artifacts.kinds import read_metadata as read_saved
from lathe_base.artifacts.metadata import Count, FileName, Metadata
from lathe_base.errors import UserError

log = logging.getLogger("lathe")

STEP = re.compile(r"step_(\d{8})")
METADATA = "trainer.json"
PARTIAL = ".partial"
HINT = "delete the folder: the run then resumes from the checkpoint before it"

T = TypeVar("T")


def step_name(step: int) -> str:
    """The folder name of a saved state."""
    return f"step_{step:08d}"


def committed_steps(folder: Path) -> list[Path]:
    """Saved states, oldest first; on a node with its own disk, its part of them."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


def saved_steps(folder: Path) -> list[Path]:
    """Steps of the complete checkpoints; corrupt ones are skipped with a warning."""
    return [path for path in committed_steps(folder) if _is_whole(path)]


class SavedMetadata(Metadata):
    """`trainer.json`; a loss that could not be measured is NaN."""

    HAS_NAN = True
    files: dict[FileName, Count]
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


def _is_whole(path: Path) -> bool:
    try:
        sizes = read_metadata(path)["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except OSError as error:
        broken = [str(error)]
    except UserError as error:
        broken = [error.what]
    if broken:
        log.warning("skipping corrupt checkpoint %s: %s", path, ", ".join(broken))
    return not broken
