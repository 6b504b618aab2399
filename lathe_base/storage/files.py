"""Files on this machine: names, digests, atomic writing, and verification against the digests in
metadata, for which each large file is read only once."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lathe_base.errors import Code, UserError

LARGE = 16 << 20  # bytes; reading a smaller file is cheaper than a cache entry
WITH_BAR = 1 << 30


def digest(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name with `/`, path) of every file and symbolic link below a folder."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for path in (Path(parent, name) for name in sorted([*links, *names])):
            yield path.relative_to(folder).as_posix(), path


def is_digest(value: object) -> bool:
    """Whether it is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_relative(name: str) -> bool:
    """Whether it names a file below a folder: no `..`, no empty part, no NUL."""
    return not ({"", ".", ".."} & set(name.split("/")) or "\0" in name)


def require_relative(name: str, where: str) -> str:
    """Return `name`; raises UserError if it leads out of its folder; see `is_relative`."""
    if not is_relative(name):
        raise UserError(
            f"{where}: {name!r} is not a relative file name ('..' or an empty part)",
            "rename the object",
            Code.UNSAFE,
        )
    return name


@contextmanager
def atomic_file(output: Path) -> Iterator[Path]:
    """Yield a temporary path beside `output`, which is renamed to `output` only on success. A
    symbolic link is kept, and the file that it points to is replaced."""
    target = Path(os.path.realpath(output))
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within a file system.
    work = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        yield work
        os.replace(work, target)
    finally:
        work.unlink(missing_ok=True)


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
    # The state is taken before the check: a file that changes meanwhile is checked again next time.
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
    # Programs can set mtime back after a change, but not ctime.
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
    from lathe_base.progress import bar  # with rich, which only long checks are worth

    with bar(f"verify {path.name}"):
        return sha256(path)
