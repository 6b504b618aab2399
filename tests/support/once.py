"""What several workers of a run need is made by the first of them."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder that `make` writes at the path it is given, the same in all workers."""
    base = factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    path.parent.mkdir(exist_ok=True)
    with open(f"{path}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:  # nobody has come to the end
            shutil.rmtree(path, ignore_errors=True)
            make(path)
            lock.write("made")
    return path
