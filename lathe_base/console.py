"""Output of the command line: log lines on stderr, results on stdout."""

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

FOREIGN_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables that disable progress bars; the libraries read them when they are imported."""


class PlainLines(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr() -> None:
    """Print Lathe's own log lines on stderr, and no other library's.

    Without a terminal, progress bars of other libraries are disabled too, here and in child
    processes: a log would have a line for each time that they are redrawn.
    """
    if not sys.stderr.isatty():
        for name in FOREIGN_BARS:
            os.environ.setdefault(name, "1")
    log = logging.getLogger("lathe")
    log.addHandler(PlainLines())
    log.setLevel(logging.INFO)
    log.propagate = False


def print_any_text() -> None:
    """Let stdout and stderr print characters that their encoding lacks as escapes, `\\xe9`.

    Arguments that are not UTF-8 and terminals without UTF-8 (`LC_ALL=C`) are no reason to fail.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_cleanly_on_sigterm() -> None:
    """Let SIGTERM raise an exception, so that partial outputs are cleaned up.

    A running training handles the signal itself and saves its state; before that, its workers exit
    immediately.
    """
    # Python sets signal handlers in the main thread only.
    if "RANK" not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleanup
    sys.exit(128 + number)


def show(**values: Any) -> None:
    """Print a table on a terminal, `name: value` lines elsewhere; under torchrun in one process.

    Figures that are None are omitted. If stdout has been closed (`lathe export ... | head -1`), the
    command continues, because its outputs still have to be uploaded.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    lines: dict[str, str] = {}
    for name, value in values.items():
        if value is not None:
            form = ",d" if isinstance(value, int) else ".4g" if isinstance(value, float) else ""
            lines[name.replace("_", " ")] = format(value, form) if form else str(value)
    try:
        if sys.stdout.isatty():
            table = Table(show_header=False)
            for name, text in lines.items():
                table.add_row(name, Text(text))
            Console().print(table)
        else:
            for name, text in lines.items():
                print(f"{name}: {text}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Or Python would fail again at its exit, when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_error(value: float | None, stderr: float | None) -> str | None:
    """`26.48 ± 0.31`; None if there is no value."""
    if value is None:
        return None
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"
