"""Identifies the external bytes that a step reads, by path, address or name."""

import sys
from pathlib import Path

from lathe_base.errors import StageError
from lathe_base.storage.contents import UNKNOWN, content_of, unknown

HUB = "hf://"

Contents = dict[str, str]
"""`content` by path, address or name."""


def content(place: str) -> str:
    """Like `content_of`, for names of corpora and of models on a hub too."""
    if place == "python":
        return f"python {sys.version}"
    name = place.removeprefix(HUB)
    if name == place:
        return content_of(place)
    folder = Path(name.partition(":")[0])
    return content_of(str(folder)) if folder.is_dir() else unknown()


def require_unchanged(contents: Contents) -> None:
    """Check that the contents have not changed since the run began.

    Raises:
        StageError: one has others.
        UserError: one is missing, or a store does not answer.
    """
    for place, seen in contents.items():
        if not seen.startswith(UNKNOWN) and content(place) != seen:
            raise StageError(f"{place}: it has changed since this run began; start another run")
