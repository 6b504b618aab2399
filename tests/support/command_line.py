"""Runs the command line in this process, which has already imported torch."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from lathe.cli import main


def lathe(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `lathe ARGUMENTS` in `cwd`; returns its output and exit status."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        restoring_process_state(),
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["lathe", *arguments]),
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def restoring_process_state() -> Iterator[None]:
    """Restore logging and signal handling after a command, which sets them for its process."""
    log, on_sigterm = logging.getLogger("lathe"), signal.getsignal(signal.SIGTERM)
    handlers, level, propagate = [*log.handlers], log.level, log.propagate
    try:
        yield
    finally:
        log.handlers[:], log.level, log.propagate = handlers, level, propagate
        signal.signal(signal.SIGTERM, on_sigterm)
