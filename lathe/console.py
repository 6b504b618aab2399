"""What the command line prints: log lines on stderr, results on stdout."""

import logging
import os
import sys
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
