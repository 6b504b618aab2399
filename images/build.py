"""Build the container images and push them: `python -m images.build [--push REGISTRY]`.

Needs nothing but Python, and podman, buildah or docker. An image is tagged by the commit that it
is made of and its flavour, and by the version, which moves on.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from lathe_base import PACKAGES, __version__
from lathe_base.errors import Code, StageError, UserError, coded

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = ROOT / "images" / "refs.json"
BUILDERS = ("podman", "buildah", "docker")
IMAGES = ("serve", "train", "paddle", "janitor")
BY_NAME = ("serve-vllm",)  # large, and for few: built when it is named
PARENTS = {"paddle": "train", "serve-vllm": "serve"}
"""Image -> the one that it is built on, which is built first."""
LOCKS = {"cpu": "requirements.lock", "cuda": "cuda.lock"}
TRITON = "nvcr.io/nvidia/tritonserver:26.07-py3"  # Python 3.12, as images/serve/cuda.lock
INPUTS = ("images", *PACKAGES, "components", "pipelines", ".containerignore")


def builder() -> str:
    """The first of podman, buildah and docker that is here.

    Raises:
        UserError: none is.
    """
    for name in BUILDERS:
        if shutil.which(name):
            return name
    raise UserError(
        f"none of {', '.join(BUILDERS)} is on PATH", "install one of them", Code.NOT_INSTALLED
    )


def tag(flavour: str) -> str:
    """The commit, `-dirty` where a file that goes into an image differs from it, the flavour."""
    revision = _output("git", "rev-parse", "--short=12", "HEAD")
    dirty = "-dirty" if _output("git", "status", "--porcelain", "--", *INPUTS) else ""
    return f"{revision}{dirty}-{flavour}"


def build(image: str, name: str, flavour: str, base: str, options: list[str]) -> str:
    """Build one image under its two tags, `name` and the version, and return its id.

    Images in `PARENTS` are built on another of the tag `name`.

    Args:
        base: image to build on; empty for the Containerfile's own, or NVIDIA's Triton.
        options: passed to the builder as they are.
    """
    serves = image in ("serve", "serve-vllm")
    base = base or (TRITON if serves and flavour == "cuda" else "")
    arguments = {
        "LOCK": LOCKS[flavour],
        "FLAVOUR": flavour,
        "VERSION": __version__,
        "REVISION": _output("git", "rev-parse", "HEAD"),
        "CREATED": _created(),
        "SOURCE": _source(),
    } | ({"BASE": base} if base else {})
    if parent := PARENTS.get(image):
        arguments[parent.upper()] = f"localhost/lathe-{parent}:{name}"
    with tempfile.NamedTemporaryFile("r") as identity:
        command = [builder(), "build", "--iidfile", identity.name]
        if builder() != "docker":
            command += ["--format", "docker"]  # OCI's own format has no HEALTHCHECK
        for key, value in arguments.items():
            command += ["--build-arg", f"{key}={value}"]
        for part in (name, __version__):
            command += ["--tag", f"localhost/lathe-{image}:{part}"]
        _run([*command, *options, "--file", f"images/{image}/Containerfile", "."])
        return identity.read().strip()


def push(image: str, name: str, registry: str, options: list[str]) -> str:
    """Push the image of the tag `name`, and return its reference by digest.

    Raises:
        UserError: it is not built.
    """
    local = f"localhost/lathe-{image}:{name}"
    repository = f"{registry.rstrip('/')}/lathe-{image}"
    remote = f"{repository}:{name}"
    tool = builder()
    tagged = subprocess.run([tool, "tag", local, remote], capture_output=True, text=True)
    if tagged.returncode:
        raise UserError(
            f"{local}: {tagged.stderr.strip()}",
            "run `make images` first, with the same FLAVOUR",
            Code.NOT_FOUND,
        )
    if tool == "docker":
        _run([tool, "push", *options, remote])
        digests = _output(tool, "image", "inspect", "--format", "{{json .RepoDigests}}", remote)
        return next(digest for digest in json.loads(digests) if digest.startswith(f"{repository}@"))
    with tempfile.NamedTemporaryFile("r") as digest:
        _run([tool, "push", "--digestfile", digest.name, *options, remote])
        return f"{repository}@{digest.read().strip()}"


def _created() -> str:
    """The commit's time, so that the same commit gives the same label."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or _output("git", "log", "-1", "--format=%ct")
    return datetime.fromtimestamp(int(seconds), UTC).isoformat()


def _source() -> str:
    """The repository's address, without the credentials that it may carry."""
    found = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True
    )
    return re.sub(r"//[^/@]*@", "//", found.stdout.strip())


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"{shlex.join(command)}: {done.stderr.strip()}", Code.FAILED)
    return done.stdout.strip()


def _run(command: list[str]) -> None:
    print("+", shlex.join(command), flush=True)
    if status := subprocess.run(command, cwd=ROOT).returncode:
        raise StageError(
            f"{shlex.join(command[:2])} ended with status {status}; see above", Code.FAILED
        )


def main() -> None:
    """Build or push the images that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=f"default: all but {', '.join(BY_NAME)}"
    )
    parser.add_argument("--flavour", choices=LOCKS, default="cpu")
    parser.add_argument("--base", default="", help="base image, preferably with a digest")
    parser.add_argument("--options", default="", help="the builder's own, in one argument")
    parser.add_argument("--push", metavar="REGISTRY", help="push the images to this registry")
    given = parser.parse_args()
    names, options = given.images or IMAGES, shlex.split(given.options)
    try:
        known = (*IMAGES, *BY_NAME)
        if unknown := set(names) - set(known):
            raise UserError(
                f"unknown image {', '.join(unknown)}",
                f"choose from: {', '.join(known)}",
                Code.UNKNOWN_NAME,
            )
        made = tag(given.flavour)
        if given.push is None:
            parents = {PARENTS[n] for n in names if n in PARENTS}
            names = [n for n in known if n in names or n in parents]
            built = {n: build(n, made, given.flavour, given.base, options) for n in names}
            for name, identity in built.items():
                print(f"localhost/lathe-{name}:{made} {identity}")
            return
        pushed = {name: push(name, made, given.push, options) for name in names}
    except (UserError, StageError) as error:
        print(coded(error), file=sys.stderr)
        sys.exit(error.status)
    references = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    REFERENCES.write_text(json.dumps(references | pushed, indent=2) + "\n")
    print(*pushed.values(), sep="\n")


if __name__ == "__main__":
    main()
