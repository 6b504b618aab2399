"""The packages in the environments of a local run's steps."""

import json
import os
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from lathe.backends.paddle_process import PYTHON_VARIABLE as PADDLE
from lathe_base.storage import digest
from lathe_serving.environment import PYTHON_VARIABLE as SERVE
from pipelines.compiler.reach import REPOSITORY

STARTED = {
    "lathe.backends.paddle_process": (PADDLE, ".venv-paddle"),
    "lathe_serving.environment": (SERVE, ".venv-serve"),
}
"""Module that starts processes in another environment -> environment variable with the path of its
Python, and the environment's default folder."""


def packages_digest(modules: Collection[str]) -> str:
    """Digest of this Python's version and the names and versions of all packages in its environment
    and in the environments that the modules start processes in."""
    folders = tuple(path for path in sys.path if path.endswith("site-packages"))
    found = [sys.version, _names(folders)]
    for module, (variable, beside) in STARTED.items():
        if module in modules:
            python = Path(os.environ.get(variable) or REPOSITORY / beside / "bin" / "python")
            found.append(_names(tuple(_packages_of(python))))
    return digest(json.dumps(found))


def _packages_of(python: Path) -> Iterator[str]:
    for path in sorted(python.parent.parent.glob("lib/python*/site-packages")):
        yield str(path)


@cache
def _names(folders: tuple[str, ...]) -> list[str]:
    return sorted(
        name
        for folder in folders
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if name.endswith((".dist-info", ".egg-info"))
    )
