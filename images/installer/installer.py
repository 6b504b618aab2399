"""Installs packages from a lock file with uv, or with pip if uv is not available."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import indexes
from indexes import IndexAnswer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OWN_UV = ROOT / ".uv"
LARGE = 100  # MiB; the download of smaller packages is not worth a line
OLDEST_UV = (0, 5)  # knows UV_INDEX and UV_DEFAULT_INDEX


class InstallError(Exception):
    """An environment cannot be made: what is wrong, and what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n  hint: {hint}")


@dataclass(frozen=True)
class Installer:
    """uv or pip, with the environment that tells it where packages are."""

    uv: Path | None
    environment: dict[str, str]

    def install(self, folder: Path, lock: Path, *options: str) -> None:
        """Install what a lock file lists into a virtual environment.

        Args:
            options: more options of uv; pip is not given them.

        Raises:
            InstallError: with what uv or pip said.
        """
        what = ["--no-deps", "--require-hashes", "--requirement", str(lock)]
        python = ["--python", str(folder / "bin" / "python")]
        if self.uv:
            command = [str(self.uv), "pip", "install", *python, *what, *options]
        else:
            command = [*pip(), *python, "install", "--progress-bar=off", *what]
        _run_with_progress(command, self.environment, str(lock))

    def without_silent_indexes(self, lock: Path) -> "Installer":
        """Leave out extra indexes that do not answer: uv would give up at the first package."""
        extra = indexes.extra_indexes(self.environment)
        if not self.uv or not extra:
            return self
        _, answers = indexes.ask(self.uv, next(requirements(lock)), self.environment, extra)
        for index in extra:
            if answers[index] is IndexAnswer.SILENT:
                print(f"{indexes.address(index)} does not answer, skipping it", flush=True)
        return self.with_indexes([i for i in extra if answers[i] is not IndexAnswer.SILENT])

    def with_indexes(self, extra: list[str]) -> "Installer":
        """The same with these extra indexes and no others."""
        environment = indexes.without(self.environment, "UV_INDEX", "UV_EXTRA_INDEX_URL")
        return Installer(self.uv, environment | ({"UV_INDEX": " ".join(extra)} if extra else {}))

    def with_cpu_build(self, lock: Path) -> "Installer | str":
        """The installer that gets the CPU build of PyTorch, or why there is none.

        Args:
            lock: pins it, as `torch==2.13.0+cpu`.
        """
        index = os.environ.get("TORCH_INDEX") or indexes.TORCH_INDEX
        torch = next(line for line in requirements(lock) if line.startswith("torch=="))
        if self.uv is None:
            found = _pip_with_cpu_build(torch, index, self.environment)
            return Installer(None, found) if found else "no index has the CPU build of PyTorch"
        extra = indexes.extra_indexes(self.environment)
        configured, answers = indexes.ask(self.uv, torch, self.environment, [*extra, index])
        if IndexAnswer.FOUND in (configured, *(answers[i] for i in extra)):
            return self
        if answers[index] is IndexAnswer.FOUND:
            return self.with_indexes([*extra, index])
        what = {IndexAnswer.SILENT: "does not answer", IndexAnswer.ABSENT: "does not have it"}
        return (
            f"cannot get the CPU build of PyTorch: {indexes.address(index)} {what[answers[index]]}"
        )


def requirements(lock: Path) -> Iterator[str]:
    """Yields each pinned package of a lock file with its hashes."""
    pinned = r"^[\w.-]+==\S+(?: \\\n    --hash=\S+)+"
    yield from re.findall(pinned, lock.read_text(), re.MULTILINE)


def find_installer(wanted: str = "") -> Installer:
    """uv from PATH, or else from the package index into .uv/; pip if uv is not available.

    Args:
        wanted: `pip` passes over uv.

    Raises:
        InstallError: neither is here.
    """
    if wanted == "pip":
        return Installer(None, dict(os.environ))
    environment = indexes.uv_environment(indexes.pip_settings())
    installed_uv = OWN_UV / "bin" / "uv"
    for candidate in (shutil.which("uv"), installed_uv):
        if candidate and _is_usable(Path(candidate)):
            return Installer(Path(candidate), environment)
    # In a separate folder, so that no existing Python is changed.
    command = [*pip(), "install", "--no-deps", "--require-hashes", "--upgrade"]
    command += ["--requirement", str(HERE / "uv.lock"), "--target", str(OWN_UV)]
    installed = subprocess.run(command, capture_output=True)
    if installed.returncode == 0 and _is_usable(installed_uv):
        return Installer(installed_uv, environment)
    print("cannot install uv from the package index: using pip, which takes minutes", flush=True)
    return Installer(None, dict(os.environ))


def pip() -> list[str]:
    """The command of this Python's pip.

    Raises:
        InstallError: it has none.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(
            f"{sys.executable} has no pip, and there is no uv on PATH",
            "install one of them, such as `apt-get install python3-pip`",
        )
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _is_usable(uv: Path) -> bool:
    """Whether it starts (pyenv has shims for programs that are not installed) and is new enough."""
    try:
        said = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return False
    found = re.match(r"uv (\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_UV


def _pip_with_cpu_build(torch: str, index: str, given: dict[str, str]) -> dict[str, str] | None:
    """The environment in which pip finds the CPU build: as it is, or with `index`."""
    command = [*pip(), "install", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--retries=0", f"--timeout={indexes.PATIENCE - 1:.0f}", "--requirement"]
    extra = given.get("PIP_EXTRA_INDEX_URL", "")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(torch)
        wanted.flush()
        for added in ("", index):
            environment = given | {"PIP_EXTRA_INDEX_URL": f"{extra} {added}".strip()}
            asked = subprocess.run([*command, wanted.name], env=environment, capture_output=True)
            if asked.returncode == 0:
                return environment
    return None


def _run_with_progress(command: list[str], environment: dict[str, str], what: str) -> None:
    """Run an installer and say what it fetches: on a terminal in one line that changes."""
    began = time.monotonic()
    fetching: dict[str, str] = {}
    said: list[str] = []
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        if word == "Downloading" and rest.endswith(")"):  # uv: Downloading torch (502.2MiB)
            name, _, size = rest[:-1].partition(" (")
            fetching[name] = size
            if not sys.stdout.isatty() and _mebibytes(size) >= LARGE:
                print(f"  fetching {name}, {size}", flush=True)
        elif word == "Downloaded":
            fetching.pop(rest, None)
        elif word not in ("+", "-", "Using"):
            said.append(line)
        if sys.stdout.isatty():
            largest = sorted(fetching, key=lambda name: -_mebibytes(fetching[name]))
            now = ", ".join(f"{name} ({fetching[name]})" for name in largest) or line.strip()
            status = f"  {time.monotonic() - began:.0f} s: {now}"
            print(f"\r\033[K{status[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.wait():
        raise InstallError(
            f"{what} was not installed:\n{''.join(said[-12:]).rstrip()}",
            "if an index is at fault, see PIP_INDEX_URL, UV_DEFAULT_INDEX and pip.conf",
        )


def _mebibytes(size: str) -> float:
    """`502.2MiB` and `1.2GiB` as uv writes them; 0 for less than a MiB."""
    number = float(re.sub(r"[^\d.]", "", size) or 0)
    return {"M": number, "G": number * 1024}.get(size.lstrip("0123456789.")[:1], 0)
