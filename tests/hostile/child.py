"""Runs the command line in a fork of this process, which has already imported everything."""

import atexit
import io
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.hostile.ordinary import drop_rights

MEMORY = 12 << 30
"""Limit of the address space in bytes: larger allocations fail without disturbing the machine."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command; a status of None means that it was killed after the time limit."""

    status: int | None
    text: str
    seconds: float


def run(
    work: Callable[[], object],
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    limit: float,
    as_user: bool = False,
    in_deleted: bool = False,
) -> Outcome:
    """Call `work` in a forked child with the working directory `folder` and its output in `log`."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(work, folder, log, environment, as_user, in_deleted)
    status = _wait(pid, limit)
    seconds = time.monotonic() - started
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that it left running
    return Outcome(status, log.read_bytes().decode(errors="backslashreplace"), seconds)


def _wait(pid: int, limit: float) -> int | None:
    handle = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([handle], [], [], limit)
    finally:
        os.close(handle)
    if not ready:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(
    work: Callable[[], object],
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    as_user: bool,
    in_deleted: bool,
) -> NoReturn:
    status = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        _redirect(log)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        if as_user:
            drop_rights()
        if in_deleted:
            shutil.rmtree(folder)
        status = exit_status(work)
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def exit_status(work: Callable[[], object]) -> int:
    """Run `work` and the exit handlers; returns the status with which Python would exit."""
    status = 0
    try:
        import torch

        torch.set_num_threads(1)
        work()
    except SystemExit as ended:
        status = _as_status(ended.code)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _as_status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
    )
