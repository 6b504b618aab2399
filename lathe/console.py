"""What the command line prints: log lines on stderr, results on stdout."""

import io
import logging
import os
import signal
import sys
import threading
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class PlainLines(logging.Handler):
    """Looks `sys.stderr` up at every line: a progress bar puts its own in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr() -> None:
    log = logging.getLogger("lathe")
    log.addHandler(PlainLines())
    log.setLevel(logging.INFO)
    log.propagate = False


def print_any_text() -> None:
    """Let stdout and stderr show what their encoding lacks as escapes, `\\xe9`, and never raise.

    Arguments that are not UTF-8, and a terminal that is not (`LC_ALL=C`), are no mistake.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_cleanly_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, so that what is half written goes again.

    A training takes the signal itself while it runs, and saves; its workers end at once before.
    """
    if "RANK" not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def show(**figures: Any) -> None:
    """A table on a terminal, `name: value` lines elsewhere; under torchrun from one process.

    None is left out.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    lines = {name.replace("_", " "): _figure(v) for name, v in figures.items() if v is not None}
    if not sys.stdout.isatty():
        for name, value in lines.items():
            print(f"{name}: {value}")
        return
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, Text(value))
    Console().print(table)


def with_error(value: float | None, stderr: float | None) -> str | None:
    """`26.48 ± 0.31`; None for none."""
    if value is None:
        return None
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"


def _figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
