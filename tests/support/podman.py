"""Builds and runs images with podman: settings, a base image made without a registry, and
containers restricted as in a cluster."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BASE = "localhost/lathe-test-base:bookworm"
PACKAGES = "python3.11 python3.11-venv python3-pip libpython3.11 ca-certificates libnuma1"
MIRROR = "http://deb.debian.org/debian"
SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

# Restrictions of a pod in a namespace with the `restricted` Pod Security Standard.
RESTRICTED = ["--read-only", "--user=10001", "--cap-drop=ALL", "--tmpfs=/tmp"]
RESTRICTED += ["--security-opt=no-new-privileges"]


def unavailable() -> str:
    """Reason why images cannot be built and run here; empty if they can."""
    if os.geteuid():
        return "not root"
    missing = [name for name in ("podman", "runc", "debootstrap") if not shutil.which(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""


def podman(*arguments: str | Path, check: bool = True, timeout: float = 300) -> str:
    """Run podman and return its standard output."""
    done = subprocess.run(
        ["podman", *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_base(folder: Path) -> str:
    """Build a Debian image with python3, pip and venv, in place of the official Python image."""
    if subprocess.run(["podman", "image", "exists", BASE]).returncode == 0:
        return BASE
    root = folder / "root"
    install = (
        "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq "
        f"--no-install-recommends {PACKAGES} && rm -rf /var/lib/apt/lists/* "
        "/var/cache/apt/archives/*.deb && : > /etc/resolv.conf"
    )
    for command in (
        ["debootstrap", "--variant=minbase", "bookworm", str(root), MIRROR],
        ["chroot", str(root), "sh", "-ec", install],
        ["sh", "-ec", f"tar -C {root} -c . | podman import - {BASE}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.rmtree(root)
    return BASE


def pip_options(folder: Path) -> list[str]:
    """Options of `podman build` that pass on this machine's pip configuration.

    Files and folders named in the configuration are mounted below /mnt, which every base image
    has: any other mount point would be left as an empty folder in a layer.
    """
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^(?:global|:env:)\.(\S+)='(.*)'$", listed.stdout, re.MULTILINE)
    lines, volumes = ["[global]"], [f"--volume={folder}:/mnt:ro"]
    for key, value in dict(found).items():
        words = []
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                part = path.parent if key.endswith("index-url") else path  # its links are relative
                name = part.as_posix().strip("/").replace("/", "-")
                (folder / name).mkdir() if part.is_dir() else (folder / name).touch()
                volumes.append(f"--volume={part}:/mnt/{name}:ro")
                word = word.replace(str(part), f"/mnt/{name}")
            words.append(word)
        lines.append(f"{key} = {' '.join(words)}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return ["--network=host", "--build-arg=PIP_CONFIG_FILE=/mnt/pip.conf", *volumes]


def mount(folder: Path, at: str) -> str:
    """Option that mounts a folder read-only; its files are made readable for all users."""
    subprocess.run(["chmod", "--recursive", "a+rX", folder], check=True)
    return f"--volume={folder}:{at}:ro"


def run(image: str, *command: str, options: list[str] | None = None) -> str:
    """Run a command in a temporary container with the restrictions of a cluster."""
    return podman("run", "--rm", *RESTRICTED, *(options or []), image, *command)


@contextmanager
def running(image: str, *options: str) -> Iterator[str]:
    """Run a container with the image's own command; yields its id."""
    container = podman("run", "--detach", *RESTRICTED, *options, image).strip()
    try:
        yield container
    finally:
        podman("rm", "--force", "--time", "20", container)
