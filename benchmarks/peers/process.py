"""Environments of engines, and their processes."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from peers.entries import COMMON, Entry

BENCHMARKS = Path(__file__).parents[1]
# Huge pages for all engines, as in Lathe's server.
SETTINGS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PYTHON_PATH = {"PYTHONPATH": str(BENCHMARKS.parent)}
NATIVE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}


class Failed(Exception):
    """An engine that cannot be installed, converted or run; has the last line of its output."""


def interpreter_path(entry: Entry, folder: Path) -> str:
    """Interpreter of an entry's environment."""
    if not entry.requirements:
        return sys.executable
    return str(folder.resolve() / entry.environment / "bin" / "python")


def make_environment(entry: Entry, folder: Path) -> None:
    """Create an entry's environment with its pinned packages, unless it exists."""
    place, wanted = folder / entry.environment, " ".join(COMMON + entry.requirements)
    done = place / "installed"
    if not entry.requirements or (done.is_file() and done.read_text() == wanted):
        return
    venv.create(place, clear=True, with_pip=True)
    install = [interpreter_path(entry, folder), "-m", "pip", "install", "--quiet", *wanted.split()]
    _run(install, place / "install.log", os.environ | NATIVE)
    done.write_text(wanted)


def convert(entry: Entry, environments: Path, model: Path, calibration: Path, output: Path) -> None:
    """Convert a checkpoint to an entry's format, unless that is done already."""
    if output.is_dir():
        return
    work = output.with_name(f"{output.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    task = ["convert", entry.module, model, calibration, entry.weights, work]
    command = [interpreter_path(entry, environments), "-m", "peers.worker", *map(str, task)]
    _run(command, output.with_name(f"{output.name}.log"), variables(1))
    work.rename(output)


class Worker:
    """A process of an engine with a converted model; a context manager that stops it.

    Attributes:
        version: version of the engine.
    """

    def __init__(
        self, entry: Entry, environments: Path, folder: Path, vocabulary: int, threads: int = 1
    ) -> None:
        task = ["serve", entry.module, str(folder.resolve()), str(vocabulary), str(threads)]
        self.log = folder.with_name(f"{entry.module}-{entry.weights}.served.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [interpreter_path(entry, environments), "-m", "peers.worker", *task],
                cwd=BENCHMARKS,
                env=variables(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.version: str = self._answer()

    def ask(self, method: str, argument: int | str) -> Any:
        """Call a method of the worker and wait for the result."""
        assert self.process.stdin is not None
        try:
            print(json.dumps([method, argument]), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(_last_line(self.log)) from None
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise Failed(_last_line(self.log))

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def variables(threads: int) -> dict[str, str]:
    """Environment of an engine's process."""
    return os.environ | SETTINGS | PYTHON_PATH | {"OMP_NUM_THREADS": str(threads)}


def _run(command: list[str], log: Path, environment: dict[str, str]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        done = subprocess.run(
            command, cwd=BENCHMARKS, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise Failed(_last_line(log))


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "ended without a word"
