"""A progress bar with ETA on a terminal, sparse plain log lines everywhere else."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger("lathe")

T = TypeVar("T")

LOG_EVERY_SECONDS = 10.0


class Bar:
    """Counts towards a total; `advance` may carry a short status text such as a rate."""

    def __init__(
        self, what: str, total: int | None, progress: Progress | None, logs: bool = True
    ) -> None:
        self.what, self.total, self.done, self.logs = what, total, 0, logs
        self._progress = progress
        self._task = progress.add_task(what, total=total, status="") if progress else None
        self._started = self._logged = time.monotonic()

    def advance(self, n: int = 1, status: str = "") -> None:
        self.done += n
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=n, status=status)
            return
        now = time.monotonic()
        if self.logs and now - self._logged >= LOG_EVERY_SECONDS:
            self._logged = now
            log.info("%s: %s%s", self.what, self._position(now), f", {status}" if status else "")

    def _position(self, now: float) -> str:
        if not self.total:
            return f"{self.done}"
        eta = (now - self._started) / max(self.done, 1) * (self.total - self.done)
        return f"{self.done}/{self.total}, {eta:.0f} s left"


@contextmanager
def bar(what: str, total: int | None = None, logs: bool = True) -> Iterator[Bar]:
    """`with bar("tokenize", total=n) as b: b.advance(k, "1,200 documents/s")`.

    Args:
        logs: off a terminal, log the position now and then; False where the caller logs its own.
    """
    if not sys.stderr.isatty():
        yield Bar(what, total, None, logs)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bar(what, total, progress)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar: `for batch in track(batches, "evaluate", total=len(batches))`."""
    with bar(what, total) as b:
        for item in items:
            yield item
            b.advance()
