"""Where the saved states of a run lie, and which of them are whole.

`state/step_00000200/` holds the tensors of every process and, written last, `trainer.json`.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("lathe")

STATE = "state"
STEP = re.compile(r"step_(\d{8})")
CARD = "trainer.json"
PARTIAL = ".partial"


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def committed_steps(folder: Path) -> list[Path]:
    """Saved states, oldest first; of a node with a disk of its own, its part of them."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


def saved_steps(folder: Path) -> list[Path]:
    """Those that are whole; a broken one is passed over with a warning."""
    return [path for path in committed_steps(folder) if _is_whole(path)]


def read_card(path: Path) -> dict[str, Any]:
    """The `extra` of a save."""
    card: dict[str, Any] = json.loads((path / CARD).read_text())
    return card


def _is_whole(path: Path) -> bool:
    try:
        sizes = json.loads((path / CARD).read_text())["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        broken = [str(error)]
    if broken:
        log.warning("%s is broken (%s): not used", path, ", ".join(broken))
    return not broken
