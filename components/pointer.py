"""Pointers to artifacts on a volume, which Pipelines itself does not support.

Pipelines' launcher (2.17) fails every step with an input that is not in an object store. So for
Pipelines an artifact on a volume is a folder with one small file that contains its address. It is
uploaded and fetched, shown in the UI, and found by the cache and by resumed runs.
"""

import os
import shutil
from pathlib import Path

from kfp import dsl

POINTER = "address.txt"


def resolve_pointer(artifact: dsl.Artifact) -> str:
    """The address of an artifact's files."""
    pointer = Path(artifact.path) / POINTER
    return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else artifact.uri


def write_pointer(output: dsl.Artifact, address: str) -> None:
    """Record that an output has been written to an address: for Pipelines, as a pointer."""
    if "KFP_RUN_ID" not in os.environ:
        output.uri = address
    elif address != output.uri:
        path = Path(output.path)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / POINTER).write_text(f"{address}\n", encoding="utf-8")
