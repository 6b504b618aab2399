"""Run a pipeline on this machine: no cluster, no Docker.

    python -m pipelines.run full --corpus corpus.txt -o Engine.max_steps=200

Everything is written under the run folder. Run into the same folder again with the same input
and the stages that finished are not done twice.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lathe.data.newest import NEWEST
from lathe.errors import UserError
from lathe.recipe import load_recipe
from lathe.storage import is_remote
from pipelines.arguments import recipe_names, takes_arguments, wrong_names
from pipelines.log import StageLog
from pipelines.summary import show

RUNS = Path("run")
GRACE_SECONDS = 15.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPOSITORY = Path(__file__).resolve().parents[1]


class StageFailed(RuntimeError):
    """A stage failed; the message is the stage's own."""


class Interrupted(BaseException):
    """The signal that ends this run."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(name: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Run pipeline `name` into `folder`, with a readable log on stdout and all of it in run.log.

    Raises:
        UserError: an argument is wrong; found before the first stage starts.
        StageFailed: with the stage's own message.
    """
    recipes = check(name, arguments)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache" / fingerprint(arguments, recipes)
    command = [sys.executable, "-u", "-m", "pipelines.local"]
    command += [name, str(folder), str(cache), json.dumps(arguments)]
    log = StageLog()
    with _worker(command) as worker, (folder / "run.log").open("a") as full:
        assert worker.stdout is not None
        for line in worker.stdout:
            full.write(line)
            for shown in log.feed(line):
                print(shown, flush=True)
            if log.failed:  # KFP would go on with the stages that do not need this one
                break
        else:
            worker.wait()
    if log.failed or worker.returncode:
        raise StageFailed(f"{log.error()}\nthe whole log: {folder / 'run.log'}")


def check(name: str, arguments: dict[str, Any]) -> list[str]:
    """Check what can be checked before work begins; return the recipes, resolved, as JSON."""
    for problem in wrong_names(name, arguments):
        raise problem
    for key in ("model", "cloze"):
        path = arguments.get(key)
        if path and not is_remote(path) and not Path(path).exists():
            raise UserError(f"{key}: no such file or folder: {path}", "check the path")
    names = recipe_names(name, arguments).values()
    return [load_recipe(n, arguments["overrides"]).model_dump_json() for n in names]


def fingerprint(arguments: dict[str, Any], recipes: Sequence[str]) -> str:
    """Digest of all that a stage's result depends on and KFP's cache key leaves out."""
    parts = ("lathe", "components", "pipelines")
    files = [f for part in parts for f in sorted((REPOSITORY / part).rglob("*.py"))]
    for value in arguments.values():
        if isinstance(value, str) and (path := Path(value.removeprefix(NEWEST))).exists():
            files += sorted(path.rglob("*")) if path.is_dir() else [path]
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([recipes, stamps]).encode()).hexdigest()[:16]


@contextmanager
def _worker(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, in a session of its own; leaving the block ends all that it started."""
    worker = subprocess.Popen(
        command,
        # Else a folder named lathe where the user stands would be taken for the package.
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    handlers = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        yield worker
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _end_group(worker)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)


def _end_group(worker: subprocess.Popen[str]) -> None:
    """Ask the worker's process group to end, wait, then kill what is left of it."""
    deadline = time.monotonic() + GRACE_SECONDS
    number = int(signal.SIGTERM)
    while True:
        worker.poll()  # a zombie still counts as one of the group
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            return
        time.sleep(0.1)
        number = signal.SIGKILL if time.monotonic() > deadline else 0


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@takes_arguments
def main(
    pipeline: str,
    arguments: dict[str, Any],
    name: Annotated[str, typer.Option(help="Run folder under run/; default: the time.")] = "",
) -> None:
    """Run a pipeline on this machine and print what came of it."""
    folder = RUNS / (name or datetime.now().strftime("%Y%m%d-%H%M%S"))
    try:
        run(pipeline, folder, arguments)
    except UserError as error:
        fail(f"error: {error}", 2)
    except StageFailed as error:
        fail(f"error: {error}", 1)
    except Interrupted as error:
        fail("interrupted: every process of the run has ended", 128 + error.number)
    show(folder, pipeline, RUNS / "deployed")


def fail(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    app()
