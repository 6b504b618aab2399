"""What uploads and downloads share: the parts of large files, the ETags that a store derives from
their MD5s, parallel requests with results in order, and a progress bar for bytes."""

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

MIB = 1 << 20
PART_BYTES = 8 * MIB
MAX_PARTS = 10_000  # of one object; S3's limit
CONNECTIONS = 8
SHOWN_AFTER_SECONDS = 2.0

A = TypeVar("A")
B = TypeVar("B")


def part_size(size: int) -> int:
    """Bytes of each part but the last, for a file of `size` bytes; the same in every attempt."""
    # Whole MiB, and larger than usual only where there would be more than MAX_PARTS.
    return max(PART_BYTES, -(-size // (MAX_PARTS * MIB)) * MIB)


def part_count(size: int) -> int:
    """Number of parts of a file of this size."""
    return -(-size // part_size(size))


class Etag:
    """Computes a store's ETag of an object: the MD5 of its bytes or, after a multipart upload, the
    MD5 of the parts' MD5s and the number of parts (S3, MinIO, SeaweedFS)."""

    def __init__(self, in_parts: bool) -> None:
        self._in_parts, self._count, self._md5 = in_parts, 0, hashlib.md5()

    def update(self, part: bytes) -> None:
        """Add the next `part_size` bytes, or the rest."""
        self.add(hashlib.md5(part).digest() if self._in_parts else part)

    def add(self, md5: bytes) -> None:
        """Add the next part by its MD5."""
        self._count += 1
        self._md5.update(md5)

    def text(self) -> str:
        """The ETag of the parts so far."""
        return self._md5.hexdigest() + (f"-{self._count}" if self._in_parts else "")


def is_md5(etag: str) -> bool:
    """Whether an ETag looks like an MD5; with encryption it may still be something else."""
    return re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None


def same_content(path: Path, etag: str) -> str | None:
    """The file's SHA-256 if a store's ETag is that of the file's bytes, else None."""
    result_etag, digest = Etag("-" in etag), hashlib.sha256()
    with path.open("rb") as file:
        size = part_size(path.stat().st_size)
        while data := file.read(size):
            digest.update(data)
            result_etag.update(data)
    return digest.hexdigest() if result_etag.text() == etag else None


def in_order(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """`map` on threads, with at most CONNECTIONS + 1 items in flight.

    Each item is taken from `items` in the caller's thread, while earlier ones are processed.
    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        # The results are taken in order, so a slow item holds back at most CONNECTIONS others: that
        # many parts of a file are in memory.
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > CONNECTIONS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # After an error, leaving the pool waits only for the items that have begun.
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
            from lathe_base.progress import bar  # only now, because it imports rich

            total = self._total // MIB
            self._bar = self._bars.enter_context(bar(f"{self._what}, MiB", total)).advance
        step = self._done // MIB - self._drawn
        self._drawn += step
        self._bar(step, f"{self._done / seconds / 1e6:.0f} MB/s")


@contextmanager
def progress(what: str, total: int) -> Iterator[ByteProgress]:
    """`with progress("fetch s3://b/k", total=bytes) as p: p.advance(bytes)`."""
    with ExitStack() as bars:
        yield ByteProgress(what, total, bars)
