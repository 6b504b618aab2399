"""Locations of a component's artifacts: local paths for its stage, addresses in the store for other
steps. And a step's figures: those that it records, and those of its whole run.

`LATHE_STORE` is an address below which models and data sets are stored instead of in Pipelines' own
store: `file:///pvc` on a volume that all pods mount, for a cluster without an object store.

Pipelines itself does not support that: its launcher (2.17) fails every step with an input that is
not in an object store. So for Pipelines an artifact on a volume is a folder with one small file,
the pointer, that contains its address. It is uploaded and fetched, shown in the UI, and found by
the cache and by resumed runs.
"""

import atexit
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, overload

from kfp import dsl

from components import tracking
from lathe_base.artifacts.remote import download
from lathe_base.errors import StageError, UserError
from lathe_base.storage import is_remote, upload
from lathe_launch.cluster.status import step_usage
from lathe_launch.usage import PREFIX, Usage

log = logging.getLogger("lathe")

OptionalArtifact: TypeAlias = dsl.Artifact | None
"""An input artifact; None for an optional one that was not given."""

FIGURES = "figures: "
"""Prefix of the log line with a step's figures as JSON."""

STORE = "LATHE_STORE"
"""Environment variable: the address below which a local run stores every artifact, and a step in a
pod its models and data sets; metrics, verdicts and pages stay where the UI and `make runs` find
them."""

POINTER = "address.txt"

LOCAL_RUN = re.compile(r"-\d{4}(?:-\d\d){5}-\d{6}$")
"""The end of the name that KFP's local runner gives a run's folder."""


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
    paths: list[Path | None] = []
    for artifact in artifacts:
        if not artifact:
            paths.append(None)
            continue
        path, address = Path(artifact.path), resolve_pointer(artifact)
        is_here = address == artifact.uri and (path.exists() or not is_remote(address))
        paths.append(path if is_here else _downloaded(address, path.name))
    return tuple(paths)


@cache
def _downloaded(address: str, name: str) -> Path:
    """A copy of a folder or file in a store, once per process, which deletes it when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="lathe-input-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    download(address, folder / name)
    return folder / name


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


def output_address(output: dsl.Artifact) -> str:
    """The address of an output: below LATHE_STORE if it is set, otherwise Pipelines' own."""
    store = os.environ.get(STORE, "").rstrip("/")
    in_pod = "KFP_RUN_ID" in os.environ
    is_large = isinstance(output, dsl.Model | dsl.Dataset)
    if not store or output.uri.startswith(f"{store}/") or (in_pod and not is_large):
        return str(output.uri)
    # The same folders as in Pipelines' store: run, task, output.
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
    values = result if isinstance(result, dict) else asdict(result)
    # JSON, in which Pipelines stores them, has no NaN and no infinity.
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
    figures = {k: v for k, v in numbers.items() if math.isfinite(v)}
    # Not of the artifacts: their metadata is part of cache keys, and usage differs every time.
    workers = Usage.of_figures(figures)
    figures = {name: value for name, value in figures.items() if not name.startswith(PREFIX)}
    logged = figures | (step_usage() + workers).priced().figures
    for name, value in logged.items():
        metrics.log_metric(name, value)
    print(FIGURES + json.dumps(logged), flush=True)
    Path(metrics.path).write_text(json.dumps(logged, indent=2), encoding="utf-8")
    for artifact in artifacts:
        artifact.metadata.update(figures)
    tracking.record(logged, [(artifact, resolve_pointer(artifact)) for artifact in artifacts])
    # Pipelines uploads the outputs with its own address; the others are moved here.
    for artifact in (metrics, *artifacts):
        address = output_address(artifact)
        if address not in (artifact.uri, resolve_pointer(artifact)):
            upload(Path(artifact.path), address)
            write_pointer(artifact, address)


def run_usage(output: dsl.Artifact) -> Mapping[str, Usage]:
    """What the steps of this run have used that have finished; empty, with a warning, if their
    metrics cannot be read.

    Args:
        output: an output of this step, whose address shows where those of the run are.
    """
    run = os.environ.get("KFP_RUN_ID")
    parts = (output.uri if run else output.path).split("/")
    if run in parts:
        location = "/".join(parts[: parts.index(run) + 1]) + "/"
    elif len(parts) > 3 and LOCAL_RUN.search((below := tracking.below_root(parts))[0]):
        location = "/".join(parts[: -len(below)])
    else:  # called outside of a run
        return {}
    from lathe.report.results import read_results  # takes a second; only the report needs it

    try:
        return read_results(location).usage
    except (UserError, StageError) as error:
        log.warning("the report does not show what the steps have used: %s", error)
        return {}
