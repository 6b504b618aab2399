"""Files that are still what their metadata says, each large one read once."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from lathe.errors import UserError
from lathe.storage.files import atomic_file, digest, sha256

LARGE = 16 << 20  # bytes; to read less costs less than to remember
WITH_BAR = 1 << 30


def require_intact(folder: Path, files: Mapping[str, str], metadata: str, hint: str) -> None:
    """Check the files of a folder against the SHA-256 that its metadata lists for each.

    Raises:
        UserError: one is missing, or its bytes are others; names it.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or not is_intact(path, expected):
            raise UserError(
                f"{path}: missing, truncated or altered since {metadata} was written", hint
            )


def is_intact(path: Path, expected: str) -> bool:
    """Whether a file has this SHA-256; see `once`."""
    return once(path, expected, partial(_has_digest, expected))


def once(path: Path, what: str, check: Callable[[Path], bool]) -> bool:
    """What `check` says of a file; of a large one remembered until inode, length or times change.

    What was found is kept in `~/.cache/lathe/verified` (XDG_CACHE_HOME), since an input may be
    read-only, and is never written to. Where that cannot be written either, it is found anew.
    """
    if path.stat().st_size < LARGE:
        return check(path)
    state, note = _state(path), _note(path, what)
    with suppress(OSError, ValueError):
        if note and json.loads(note.read_bytes()) == state:
            return True
    if not check(path):
        return False
    _remember(note, state)
    return True


def remember(path: Path, what: str) -> None:
    """Let `once` take the check for done: this process has just written the file."""
    if path.stat().st_size >= LARGE:
        _remember(_note(path, what), _state(path))


def cache_folder() -> Path | None:
    """Lathe's own folder for what may be deleted at any time; None without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lathe"
    return None


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _note(path: Path, what: str) -> Path | None:
    folder = cache_folder()
    return folder and folder / "verified" / digest(f"{path.resolve()} {what}")


def _remember(note: Path | None, state: list[int]) -> None:
    with suppress(OSError):
        if note:
            with atomic_file(note) as work:
                work.write_text(json.dumps(state), encoding="utf-8")


def _has_digest(expected: str, path: Path) -> bool:
    if path.stat().st_size < WITH_BAR:
        return sha256(path) == expected
    from lathe.progress import bar  # rich, which a fetch in a bare image has not

    with bar(f"verify {path.name}"):
        return sha256(path) == expected
