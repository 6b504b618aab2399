"""Check files against the digests in their metadata, reading each large file only once."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_base.storage.files import atomic_file, digest, sha256

LARGE = 16 << 20  # bytes; reading a smaller file is cheaper than a cache entry
WITH_BAR = 1 << 30


def require_intact(folder: Path, files: Mapping[str, str], metadata: str, hint: str) -> None:
    """Check the files of a folder against the SHA-256 that its metadata lists for each.

    Raises:
        UserError: a file is missing or altered; names it.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or not is_intact(path, expected):
            raise UserError(
                f"{path}: missing, truncated or modified since {metadata} was written",
                hint,
                Code.CORRUPT,
            )


def is_intact(path: Path, expected: str) -> bool:
    """Whether a file has this SHA-256; see `once`."""
    return once(path, expected, lambda file: _read(file) == expected)


def once(path: Path, what: str, check: Callable[[Path], bool]) -> bool:
    """The result of `check`; for a large file, success is cached until its inode, size or times
    change.

    The cache is in `~/.cache/lathe/verified` (XDG_CACHE_HOME), because inputs may be read-only and
    are never written to. Without a writable cache the file is checked again.
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
    """Let `once` skip the check, because this process has just written the file."""
    if path.stat().st_size >= LARGE:
        _remember(_note(path, what), _state(path))


def known_sha256(path: Path) -> str:
    """The SHA-256 of a file; for a large one it is cached like the results of `once`."""
    if path.stat().st_size < LARGE:
        return sha256(path)
    state, note = _state(path), _note(path, "sha256")
    with suppress(OSError, ValueError):
        if note and (kept := json.loads(note.read_bytes())) and kept[:-1] == state:
            return str(kept[-1])
    cached = _read(path)
    if _state(path) == state:  # else it was written to meanwhile: the digest may be of neither
        _remember(note, [*state, cached])
    return cached


def cache_folder() -> Path | None:
    """Lathe's cache folder, which may be deleted at any time; None without a home directory."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lathe"
    return None


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_ino, stat.st_dev, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _note(path: Path, what: str) -> Path | None:
    folder = cache_folder()
    return folder and folder / "verified" / digest(f"{path.resolve()} {what}")


def _remember(note: Path | None, state: Sequence[object]) -> None:
    with suppress(OSError):
        if note:
            with atomic_file(note) as work:
                work.write_text(json.dumps(state), encoding="utf-8")


def _read(path: Path) -> str:
    if path.stat().st_size < WITH_BAR:
        return sha256(path)
    from lathe_base.progress import bar  # needs rich, which a bare image lacks

    with bar(f"verify {path.name}"):
        return sha256(path)
