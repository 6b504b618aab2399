"""Where the saved states of a run lie, and which of them are whole.

`state/step_00000200/` holds the tensors of every process and, written last, `trainer.json`.
"""

import logging
import re
from pathlib import Path
from typing import Any, TypeVar

from lathe.artifacts.kinds import checked
from lathe.artifacts.kinds import read_card as read_saved
from lathe.artifacts.metadata import Card, Count, FileName
from lathe.errors import UserError

log = logging.getLogger("lathe")

STATE = "state"
STEP = re.compile(r"step_(\d{8})")
CARD = "trainer.json"
PARTIAL = ".partial"
CURE = "delete the folder: the run goes on from the state before it"

T = TypeVar("T")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def committed_steps(folder: Path) -> list[Path]:
    """Saved states, oldest first; of a node with a disk of its own, its part of them."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


def saved_steps(folder: Path) -> list[Path]:
    """Those that are whole; a broken one is passed over with a warning."""
    return [path for path in committed_steps(folder) if _is_whole(path)]


class SavedCard(Card):
    """`trainer.json`; a loss that could not be measured is NaN."""

    HAS_NAN = True
    files: dict[FileName, Count]
    progress: dict[str, Any]
    loss_scale: dict[str, Any]


def read_card(path: Path) -> dict[str, Any]:
    """The `extra` of a save.

    Raises:
        UserError: it is broken.
    """
    return read_saved(path / CARD, SavedCard, CURE).raw


def restored(path: Path, values: Any, kind: type[T]) -> T:
    """A part of a card as the object that was saved; raises as `read_card` does."""
    return checked(values, kind, str(path / CARD), CURE)


def _is_whole(path: Path) -> bool:
    try:
        sizes = read_card(path)["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except OSError as error:
        broken = [str(error)]
    except UserError as error:
        broken = [error.what]
    if broken:
        log.warning("%s is broken (%s): not used", path, ", ".join(broken))
    return not broken
