"""The environment of a step: source code, libraries, image and machine."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lathe_base import PACKAGES, __version__
from lathe_base.provenance.bundle import Builder, Digests, Resource
from lathe_base.storage import digest, sha256

ROOT = Path(__file__).resolve().parents[2]
PARTS = (*PACKAGES, "components", "pipelines")
"""Folders of Lathe's code, as far as they are in this environment."""
LOCK = ROOT / "images" / "train" / "requirements.lock"
LIBRARIES = ("torch", "onnx", "onnxruntime", "paddlepaddle", "tokenizers", "numpy", "safetensors")
IN_POD = "KUBERNETES_SERVICE_HOST"
REVISION = "LATHE_REVISION"
"""Environment variable in images: the commit that they were built from."""

IMAGE = "LATHE_IMAGE"
"""Environment variable in pods: the image of the step."""

PIPELINE = "LATHE_PIPELINE"
"""Environment variable of a pipeline's steps: its name and the SHA-256 of its compiled form, as
NAME@sha256:DIGEST."""

RUN = "LATHE_RUN"
"""Environment variable: the step's pipeline run; on a cluster it is KFP_RUN_ID."""


def dependencies() -> list[Resource]:
    """The code, libraries and image that this process runs."""
    resources = [
        Resource(
            name="lathe",
            digest=Digests(sha256=source_digest(), git_commit=revision()),
            annotations={"kind": "source code", "version": __version__},
        ),
        Resource(
            name="installed libraries",
            digest=Digests(sha256=digest("\n".join(installed()))),
            annotations={"kind": "libraries"},
        ),
    ]
    if LOCK.is_file():
        digests = Digests(sha256=sha256(LOCK))
        resources.append(
            Resource(name=LOCK.name, digest=digests, annotations={"kind": "lock file"})
        )
    if IN_POD in os.environ:  # a local run has the variable, and runs in no image
        resources += _named(IMAGE, "image")
    return [*resources, *_named(PIPELINE, "pipeline")]


def _named(variable: str, kind: str) -> list[Resource]:
    """The resource that an environment variable names, with its digest if given."""
    if not (value := os.environ.get(variable)):
        return []
    name, _, image_digest = value.partition("@sha256:")
    digests = Digests(sha256=image_digest) if image_digest else None
    return [Resource(name=name, digest=digests, annotations={"kind": kind})]


def machine() -> dict[str, Any]:
    """The machine and torch's number of threads, which affect the last bits of a sum."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
        cpu = next(names, "")
    except OSError:
        cpu = platform.processor()
    values: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    if torch := sys.modules.get("torch"):  # not imported for its own sake: some steps need none
        values["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            values["gpu"] = torch.cuda.get_device_name()
    return values


def run() -> str | None:
    """The step's pipeline run."""
    return os.environ.get(RUN) or os.environ.get("KFP_RUN_ID")


def builder() -> Builder:
    """The builder running the step."""
    where = "kubeflow" if IN_POD in os.environ else "local"
    versions = {"lathe": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Builder(id=f"urn:lathe:builder:{where}", version=versions)


@cache
def source_digest() -> str:
    """Digest of the names and contents of Lathe's own files."""
    files = [p for part in PARTS for p in sorted((ROOT / part).rglob("*")) if p.is_file()]
    files = [p for p in files if "__pycache__" not in p.parts]  # which depends on earlier imports
    return digest("".join(f"{sha256(p)}  {p.relative_to(ROOT)}\n" for p in files))


@cache
def installed() -> tuple[str, ...]:
    """`name==version` of every library in this environment."""
    versions = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return tuple(f"{name}=={version}" for name, version in sorted(versions.items()))


@cache
def revision() -> str | None:
    """The commit of the source code: the image's, or that of a clean checkout."""
    if value := os.environ.get(REVISION):
        return value
    if not (ROOT / ".git").exists():
        return None
    # A checkout with changes of its own is none of its commits.
    if _git("status", "--porcelain", "--", *PARTS) != "":
        return None
    return _git("rev-parse", "HEAD") or None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
