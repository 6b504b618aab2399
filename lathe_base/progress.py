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
    """Counts towards a total; `advance` takes an optional short status text, such as a rate."""

    def __init__(
        self,
        what: str,
        total: int | None,
        progress: Progress | None = None,
        logs: bool = True,
        first: int = 0,
    ) -> None:
        self.what, self.total, self.first, self.done, self.logs = what, total, first, first, logs
        self._progress = progress
        self._task = (
            progress.add_task(what, total=total, completed=first, status="") if progress else None
        )
        self._started = self._logged = time.monotonic()

    def advance(self, n: int = 1, status: str = "") -> None:
        """Add n to the count; without a terminal, log the position every LOG_EVERY_SECONDS."""
        self.done += n
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=n, status=status)
            return
        if self.logs and time.monotonic() - self._logged >= LOG_EVERY_SECONDS:
            self.tell(status)

    def seconds_left(self) -> float:
        """Until the total at the pace so far; 0 without a total."""
        # What an earlier attempt has done says nothing about the pace of this one.
        pace = (time.monotonic() - self._started) / max(self.done - self.first, 1)
        return pace * (self.total - self.done) if self.total else 0.0

    def tell(self, status: str = "") -> None:
        """Log the position: `step 40/900, loss 6.788, 2 min left`. On a terminal, do nothing."""
        if self._progress is not None:
            return
        self._logged = time.monotonic()
        if self.total:
            left = f"{duration(self.seconds_left())} left"
            parts = [f"{self.what} {self.done}/{self.total}", status, left]
        else:
            parts = [f"{self.what}: {self.done} so far", status]
        log.info("%s", ", ".join(part for part in parts if part))


def duration(seconds: float) -> str:
    """Seconds as text with about two digits: `45 s`, `3 min`, `2.5 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 99.5 else f"{minutes / 60:.1f} h"


@contextmanager
def bar(what: str, total: int | None = None, logs: bool = True, first: int = 0) -> Iterator[Bar]:
    """A progress bar: `with bar("tokenize", total=n) as b: b.advance(k, "1,200 documents/s")`.

    Args:
        logs: without a terminal, log the position at intervals; False if the caller logs it with
            `Bar.tell`.
        first: how much of the total an earlier attempt has done.
    """
    if not sys.stderr.isatty():
        yield Bar(what, total, None, logs, first)
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
        yield Bar(what, total, progress, logs, first)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar: `for batch in track(batches, "evaluate", total=len(batches))`."""
    with bar(what, total) as b:
        for item in items:
            yield item
            b.advance()
