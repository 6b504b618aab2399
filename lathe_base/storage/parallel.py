"""Parallel requests with results in order, and a progress bar for bytes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from lathe_base.storage.parts import MIB

A = TypeVar("A")
B = TypeVar("B")

CONNECTIONS = 8
SHOWN_AFTER_SECONDS = 2.0


def in_order(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """`map` on threads, with at most CONNECTIONS + 1 items in flight.

    Each item is taken from `items` in the caller's thread, while earlier ones are processed.
    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > CONNECTIONS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class ByteProgress:
    """Counts bytes, and shows a bar if the transfer takes longer than two seconds."""

    def __init__(self, what: str, total: int, bars: ExitStack) -> None:
        self._what, self._total, self._bars = what, total, bars
        self._done = self._drawn = 0
        self._started = time.monotonic()
        self._bar: Callable[[int, str], None] | None = None

    def advance(self, size: int) -> None:
        """Count bytes that have been transferred."""
        self._done += size
        seconds = time.monotonic() - self._started
        if self._bar is None:
            if seconds < SHOWN_AFTER_SECONDS:
                return
            self._bar = self._open()
        step = self._done // MIB - self._drawn
        self._drawn += step
        self._bar(step, f"{self._done / seconds / 1e6:.0f} MB/s")

    def _open(self) -> Callable[[int, str], None]:
        try:
            from lathe_base.progress import bar  # a bare image that only fetches lacks rich
        except ModuleNotFoundError:
            return lambda step, status: None
        return self._bars.enter_context(bar(f"{self._what}, MiB", self._total // MIB)).advance


@contextmanager
def progress(what: str, total: int) -> Iterator[ByteProgress]:
    """`with progress("fetch s3://b/k", total=bytes) as p: p.advance(bytes)`."""
    with ExitStack() as bars:
        yield ByteProgress(what, total, bars)
