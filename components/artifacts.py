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
from components.pointer import resolve_pointer, write_pointer
from lathe_base.artifacts.remote import download
from lathe_base.storage import is_remote, upload
from lathe_launch.cluster.usage import step_usage
from lathe_launch.usage import PREFIX, Usage

OptionalArtifact: TypeAlias = dsl.Artifact | None
"""An input artifact; None for an optional one that was not given."""

FIGURES = "figures: "
"""Prefix of the log line with a step's figures as JSON."""

STORE = "LATHE_STORE"
"""Environment variable: the address below which a local run stores every artifact, and a step in a
pod its models and data sets; metrics, verdicts and pages stay where the UI and `make runs` find
them."""


@overload
def local(a: OptionalArtifact, /) -> tuple[Path]: ...
@overload
def local(a: OptionalArtifact, b: OptionalArtifact, /) -> tuple[Path, Path]: ...
@overload
def local(
    a: OptionalArtifact, b: OptionalArtifact, c: OptionalArtifact, /
) -> tuple[Path, Path, Path]: ...
@overload
def local(
    a: OptionalArtifact, b: OptionalArtifact, c: OptionalArtifact, d: OptionalArtifact, /
) -> tuple[Path, Path, Path, Path]: ...
@overload
def local(*artifacts: OptionalArtifact) -> tuple[Path, ...]: ...
def local(*artifacts: OptionalArtifact) -> tuple[Path | None, ...]:
    """Folders or files of input artifacts, downloaded if KFP has not done so; None for an optional
    input that was not given, although KFP has components annotate those as always given."""
    return tuple(_local(artifact) if artifact else None for artifact in artifacts)


def _local(artifact: dsl.Artifact) -> Path:
    path, address = Path(artifact.path), resolve_pointer(artifact)
    if address == artifact.uri and (path.exists() or not is_remote(address)):
        return path
    return _brought(address, path.name)


@cache
def _brought(address: str, name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lathe-input-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    download(address, folder / name)
    return folder / name


def output_address(output: dsl.Artifact) -> str:
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

    The metrics also have what the step has used, in addition to the usage of workers elsewhere that
    the result may have. The metrics file is written too: an artifact without a file never hits
    KFP's cache.
    """
    figures = _figures(result if isinstance(result, dict) else asdict(result))
    workers = Usage.of_figures(figures)
    figures = {name: value for name, value in figures.items() if not name.startswith(PREFIX)}
    logged = figures | (step_usage() + workers).priced().figures
    for name, value in logged.items():
        metrics.log_metric(name, value)
    print(FIGURES + json.dumps(logged), flush=True)
    Path(metrics.path).write_text(json.dumps(logged, indent=2), encoding="utf-8")
    for artifact in artifacts:
        artifact.metadata.update(figures)
    tracking.record(logged, *artifacts)
    for artifact in (metrics, *artifacts):
        address = output_address(artifact)
        if address not in (artifact.uri, resolve_pointer(artifact)):
            upload(Path(artifact.path), address)
            write_pointer(artifact, address)


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
    return {k: v for k, v in numbers.items() if math.isfinite(v)}
