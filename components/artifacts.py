"""Locations of a component's artifacts: local paths for its stage, addresses in the store for other
steps.

`LATHE_STORE` is an address below which models and data sets are stored instead of in Pipelines' own
store: `file:///pvc` on a volume that all pods mount, for a cluster without an object store.
Pipelines keeps a pointer to them (`components.pointer`).
"""

import atexit
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, overload

from kfp import dsl

from components import tracking
from components.pointer import leave_at, place_of
from lathe_base.artifacts.remote import bring
from lathe_base.storage import is_remote, upload

Given: TypeAlias = dsl.Artifact | None
"""An input artifact; None for an optional one that was not given."""

FIGURES = "figures: "
"""Prefix of the log line with a step's figures as JSON."""

STORE = "LATHE_STORE"
"""Environment variable: the address below which a local run stores every artifact, and a step in a
pod its models and data sets; metrics, verdicts and pages stay where the UI and `make runs` find
them."""


@overload
def local(a: Given, /) -> tuple[Path]: ...
@overload
def local(a: Given, b: Given, /) -> tuple[Path, Path]: ...
@overload
def local(a: Given, b: Given, c: Given, /) -> tuple[Path, Path, Path]: ...
@overload
def local(a: Given, b: Given, c: Given, d: Given, /) -> tuple[Path, Path, Path, Path]: ...
@overload
def local(*artifacts: Given) -> tuple[Path, ...]: ...
def local(*artifacts: Given) -> tuple[Path | None, ...]:
    """Folders or files of input artifacts, downloaded if KFP has not done so; None for an optional
    input that was not given, although KFP has components annotate those as always given."""
    return tuple(_local(artifact) if artifact else None for artifact in artifacts)


def _local(artifact: dsl.Artifact) -> Path:
    path, place = Path(artifact.path), place_of(artifact)
    if place == artifact.uri and (path.exists() or not is_remote(place)):
        return path
    return _brought(place, path.name)


@cache
def _brought(address: str, name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lathe-input-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    bring(address, folder / name)
    return folder / name


def address_of(output: dsl.Artifact) -> str:
    """The address of an output: below LATHE_STORE if it is set, otherwise Pipelines' own."""
    store = os.environ.get(STORE, "").rstrip("/")
    in_pod = "KFP_RUN_ID" in os.environ
    is_large = isinstance(output, dsl.Model | dsl.Dataset)
    if not store or output.uri.startswith(f"{store}/") or (in_pod and not is_large):
        return str(output.uri)
    parts = (output.uri if in_pod else output.path).split("/")
    return "/".join([store, *tracking.below_root(parts)])


def copy(source: dsl.Artifact, output: dsl.Artifact) -> None:
    """Make an output artifact a copy of another folder, with its metadata."""
    shutil.copytree(*local(source), output.path)
    output.metadata.update(source.metadata)


def record(result: Any, metrics: dsl.Metrics, *artifacts: dsl.Artifact) -> None:
    """Log the numbers of a result (a dataclass or a dict) as metrics and metadata, print them for
    users who follow the run, and upload the outputs that belong below LATHE_STORE; KFP uploads the
    others.

    The metrics file is written too: an artifact without a file never hits KFP's cache.
    """
    figures = _figures(result if isinstance(result, dict) else asdict(result))
    for name, value in figures.items():
        metrics.log_metric(name, value)
    print(FIGURES + json.dumps(figures), flush=True)
    Path(metrics.path).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    for artifact in artifacts:
        artifact.metadata.update(figures)
    tracking.record(figures, *artifacts)
    for artifact in (metrics, *artifacts):
        address = address_of(artifact)
        if address not in (artifact.uri, place_of(artifact)):
            upload(Path(artifact.path), address)
            leave_at(artifact, address)


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
    return {k: v for k, v in numbers.items() if math.isfinite(v)}
