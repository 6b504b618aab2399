"""Files and folders that are whole or absent."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `output`; it takes output's place only on success."""
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
