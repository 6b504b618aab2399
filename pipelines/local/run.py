"""Run a pipeline on this machine: no cluster, no Docker.

    python -m pipelines.local.run full --corpus corpus.txt -o Engine.max_steps=200

Everything is written to the run folder. Running again with the same folder and inputs resumes: the
finished stages are not repeated.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from components.plan import plan
from lathe.data.run_inputs import look_up
from lathe.evaluate.comparison import outcome
from lathe.report.results import make_notice, read_results, rows, usage_sentence
from lathe.report.summary import summary_table
from lathe_base.checks import require
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.keys import SIGNING_KEY, generate, signing_key
from lathe_base.provenance.surroundings import RUN
from lathe_base.tracking.webhook import ADDRESS, post
from lathe_launch.parent import tied
from pipelines.commands.arguments import (
    error_messages,
    fail,
    recipe_names,
    takes_arguments,
    wide_console,
)
from pipelines.commands.inputs import (
    CACHE,
    KEY,
    LOCK,
    RUN_LOG,
    SERVES,
    argument_checks,
    input_checks,
    run_folder_checks,
)
from pipelines.local.log import DEFAULT, Forecast, StageLog

RUNS = Path("run")
DEPLOYED = RUNS / "deployed"
GRACE_SECONDS = 15.0
TRAINS = ("pretrain", "full")
"""Pipelines whose `model` is optional: it provides the initial weights."""

PROGRESS = re.compile(r" \d+/\d+, .*left$")  # the format of `lathe_base.progress.Bar.tell`

SIGNALS = (signal.SIGINT, signal.SIGTERM)

CHECKPOINTS = {
    "model": "pretrain/model",
    "pruned": "prune/pruned",
    "quantized": "quantize/quantized",
}


class StageFailed(StageError):
    """A stage failed; the message is the stage's own."""


class Interrupted(BaseException):
    """A termination signal was received."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(name: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Run pipeline `name` into `folder`, with a readable log on stdout and the full log in run.log.

    Raises:
        ExceptionGroup: all problems found by the preflight checks, as UserErrors; nothing has been
            written.
        UserError: another run is using the folder, or it cannot be written.
        StageFailed: a stage failed.
    """
    # All problems at once, before anything is written.
    recipes = check(name, folder, arguments)
    screen = Screen()
    sources = {key: arguments[key] for key in ("tokenizer", "cloze") if key in arguments}
    chat = arguments.get("chat", "")
    start = "init" if name in TRAINS and not chat else "model"
    corpus = chat or arguments.get("corpus") or recipes[0].Prepare.source
    inputs = look_up(recipes, corpus, **sources, **{start: arguments.get("model", "")})
    if corpus != inputs.corpus:
        screen.show(f"{corpus} is {inputs.corpus}")
    # The worker gets what the first step of a run on a cluster would find.
    folder = folder.absolute()
    command = [sys.executable, "-u", "-m", "pipelines.local.runner", name, str(folder)]
    command += [str(folder / CACHE), str(recipes[0].Launch.shards)]
    overrides, has_chats = arguments["overrides"], bool(chat)
    planned = plan(**recipe_names(name, arguments), overrides=overrides, has_chats=has_chats)
    command += [json.dumps(asdict(inputs) | planned), json.dumps(arguments)]
    # The stages' usual durations are those of the default run.
    forecast = Forecast() if name == DEFAULT and not any(arguments.values()) else None
    log = StageLog(forecast)
    if forecast:
        screen.show(forecast.start())
    # The lock's descriptor is passed on: the folder is locked while any process of the run lives.
    with (
        _locked(folder) as lock,
        (folder / RUN_LOG).open("a", encoding="utf-8") as full,
        _worker(command, lock, folder) as worker,
        closing(screen),
    ):
        assert worker.stdout is not None
        for line in worker.stdout:
            full.write(line)
            for shown in log.feed(line):
                screen.show(shown)
            if log.failed:  # KFP would run the stages that do not depend on this one
                break
        else:
            worker.wait()
        for shown in log.reuse():
            screen.show(shown)
    if log.failed or worker.returncode:
        error = log.error()
        raise StageFailed(f"{error}\nthe whole log: {folder / RUN_LOG}", error.code)


def check(name: str, folder: Path, arguments: dict[str, Any]) -> list[Recipe]:
    """Run all preflight checks; returns the resolved recipes.

    Raises:
        ExceptionGroup: all problems, as UserErrors.
    """
    require(argument_checks(name, arguments))
    recipes = {
        key: cache(partial(load_recipe, recipe, arguments["overrides"]))
        for key, recipe in recipe_names(name, arguments).items()
    }
    deployed = DEPLOYED if name in SERVES else None
    before = [*input_checks(name, arguments, recipes), *run_folder_checks(folder, RUNS, deployed)]
    require(before)
    return [load() for load in recipes.values()]


class Screen:
    """Displays a run's output: on a terminal, a progress line replaces the previous one."""

    def __init__(self) -> None:
        self._replaces, self._is_open = sys.stdout.isatty(), False

    def show(self, line: str) -> None:
        """Print one or more lines."""
        if self._is_open:
            print("\r\x1b[K", end="")
        self._is_open = self._replaces and PROGRESS.search(line) is not None
        if self._is_open:
            line = line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._is_open else "\n", flush=True)

    def close(self) -> None:
        """Keep the last progress line."""
        if self._is_open:
            print(flush=True)
        self._is_open = False


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock the folder for this run; yields the lock's file descriptor.

    The kernel releases the lock when the last process that holds the descriptor exits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = file.read(20).strip()
            raise UserError(
                f"{folder}: a run is active there, process {process}",
                f"wait for it, end it with `kill {process}`, or give another --name",
                Code.IN_USE,
            ) from None
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield file.fileno()


@contextmanager
def _worker(command: list[str], lock: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the worker process in its own session, with the lock's descriptor. Leaving the block
    ends all its processes, and the kernel kills it if this process is killed."""
    # The steps sign with a key that is generated for the run, unless the user has one.
    key = signing_key() or folder / KEY
    if not key.exists() and key == folder / KEY:
        generate(key)
    variables = {SIGNING_KEY: str(key.absolute()), RUN: folder.name}
    worker = subprocess.Popen(
        tied(command),
        # Otherwise a folder named lathe in the working directory shadows the package.
        env=os.environ | variables | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        pass_fds=[lock],
        start_new_session=True,
    )

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    handlers = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield worker
    finally:
        for number in SIGNALS:  # a second one must not interrupt the cleanup
            signal.signal(number, signal.SIG_IGN)
        # SIGTERM, then wait for all of its process group, then SIGKILL.
        deadline = time.monotonic() + GRACE_SECONDS
        sent: int = signal.SIGTERM
        with suppress(ProcessLookupError):
            while True:
                worker.poll()  # a zombie still belongs to the group
                os.killpg(worker.pid, sent)
                time.sleep(0.1)
                sent = signal.SIGKILL if time.monotonic() > deadline else 0
        for number, handler in handlers.items():
            signal.signal(number, handler)


def show(folder: Path, pipeline: str, deployed: Path) -> None:
    """Print the summary of a run folder; copies its reports to the top of the folder and links its
    deployment.

    Args:
        folder: the run folder; several runs may have used it.
        deployed: link that `make serve` follows, set to this run's deployment if there is one.
    """
    if metrics := newest(folder, "report*/metrics"):
        wide_console().print(summary_table(rows(json.loads(metrics.read_text(encoding="utf-8")))))
    if usage := read_results(str(folder)).usage:
        print(f"used       {usage_sentence(usage)}")
    checkpoints = CHECKPOINTS if pipeline != "compress" else {"quantized": "choose/chosen"}
    for name, output in checkpoints.items():
        if path := newest(folder, output):
            print(f"{name:11}{path}")
    if page := newest(folder, "choose/page"):
        shutil.copyfile(page, folder / "compress.html")
        print(f"trials     {folder / 'compress.html'}")
    if page := newest(folder, "report*/page"):
        shutil.copyfile(page, folder / "report.html")
        print(f"report     {folder / 'report.html'}")
    if pipeline not in SERVES:
        return
    repository, passed = newest(folder, "rehearse/deployed"), True
    if verdict := newest(folder, "gate/verdict"):
        result = json.loads(verdict.read_text(encoding="utf-8"))
        passed = result["passed"]
        print(
            "\n    ".join([f"gate       {outcome(result['verdict'], passed)}", *result["reasons"]])
        )
    if repository is None or not passed:
        print("not deployed: the quantized model did not pass the gate")
        return
    if deployed.is_symlink():  # of an earlier run
        deployed.unlink()
    deployed.symlink_to(repository, target_is_directory=True)
    print(f"server     {repository}")
    print('\ntry it: make serve && make client PROMPT="In the beginning"')


def newest(folder: Path, output: str) -> Path | None:
    """The latest `<stage>/<output>` under a run folder."""
    paths = sorted(folder.glob(f"**/{output}"), key=lambda path: path.stat().st_mtime)
    return paths[-1].absolute() if paths else None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@takes_arguments
def main(
    pipeline: str,
    arguments: dict[str, Any],
    name: Annotated[
        str, typer.Option(help="Run folder under run/. Default: the current time.")
    ] = "",
) -> None:
    """Run a pipeline on this machine and print its results."""
    with error_messages():
        folder = RUNS / (name or datetime.now().strftime("%Y%m%d-%H%M%S"))
        try:
            run(pipeline, folder, arguments)
        except Interrupted as error:
            fail("interrupted: all processes of the run have exited", 128 + error.number)
        except StageFailed as error:
            _notify(pipeline, folder, "failed", str(error))
            raise
        show(folder, pipeline, DEPLOYED)
    _notify(pipeline, folder, "succeeded")


def _notify(pipeline: str, folder: Path, state: str, why: str = "") -> None:
    """Post the result of a run to the webhook, if there is one."""
    if os.environ.get(ADDRESS):
        post(make_notice(pipeline, folder.name, state, str(folder), why=why))


if __name__ == "__main__":
    app()
