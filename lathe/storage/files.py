"""Files and folders that are whole or absent, and their digests."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe.errors import UserError


def digest(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def require_replaceable(output: Path, marker: str) -> None:
    """Raise UserError where `output` is a file, or a folder of something else: one that is neither
    empty nor holds `marker` (a pattern)."""
    if output.is_file() or (
        output.is_dir() and any(output.iterdir()) and not any(output.glob(marker))
    ):
        raise UserError(
            f"{output}: exists, and what is there has no {marker}",
            "give a new or an empty folder as output",
        )


@contextmanager
def atomic_folder(output: Path, marker: str) -> Iterator[Path]:
    """Yield a temporary folder beside `output`; it takes output's place only on success.

    An earlier output, known by `marker`, is replaced.

    Raises:
        UserError: see `require_replaceable`.
    """
    require_replaceable(output, marker)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield work
        work.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        os.replace(work, output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def atomic_file(output: Path) -> Iterator[Path]:
    """Yield a temporary name beside `output`; it takes output's name only on success."""
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        yield work
        os.replace(work, output)
    finally:
        work.unlink(missing_ok=True)
