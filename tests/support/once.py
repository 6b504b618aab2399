"""Session-wide fixtures that the first of several xdist workers creates for all."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Path of a file or folder that `make` writes once per test run, shared by all workers."""
    base = factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    path.parent.mkdir(exist_ok=True)
    with open(f"{path}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:  # not made yet, or only partly
            shutil.rmtree(path, ignore_errors=True)
            make(path)
            lock.write("made")
    return path
