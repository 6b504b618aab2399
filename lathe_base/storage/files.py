"""Atomic files, the list of files below a folder, and digests."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def atomic_file(output: Path) -> Iterator[Path]:
    """Yield a temporary path beside `output`, which is renamed to `output` only on success. A
    symbolic link is kept, and the file that it points to is replaced."""
    target = Path(os.path.realpath(output))
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        yield work
        os.replace(work, target)
    finally:
        work.unlink(missing_ok=True)
