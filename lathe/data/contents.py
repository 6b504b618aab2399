"""Identifies the external bytes that a step reads, by path, address or name."""

import sys
from pathlib import Path

from lathe_base.errors import Code, StageError
from lathe_base.storage.objects import UNKNOWN, content_id, unknown
from lathe_base.storage.splits import locate

HUB = "hf://"

Contents = dict[str, str]
"""`content` by path, address or name."""


def content(source: str) -> str:
    """Like `content_id`, for names of corpora and of models on a hub too."""
    if source == "python":
        return f"python {sys.version}"
    name = source.removeprefix(HUB)
    if name == source:
        return content_id(locate(source).location)
    folder = Path(name.partition(":")[0])
    return content_id(str(folder)) if folder.is_dir() else unknown()


def require_unchanged(contents: Contents) -> None:
    """Check that the contents have not changed since the run began.

    Raises:
        StageError: one has others.
        UserError: one is missing, or a store does not answer.
    """
    for source, seen in contents.items():
        if not seen.startswith(UNKNOWN) and content(source) != seen:
            raise StageError(
                f"{source}: it has changed since this run began; start another run", Code.CHANGED
            )
