"""What Lathe asks of an object store: each has a file of its own, and a line in `stores.py`."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

BINARY, JSON = "application/octet-stream", "application/json"


@dataclass(frozen=True)
class Stored:
    """An object as the store lists it."""

    key: str
    size: int  # bytes
    etag: str  # another for other bytes; S3's digest (see `parts.Etag`), where it is one
    time: datetime
    part_bytes: str | None = None  # of its ETag, where Lathe put it; only `stat` knows


class Body(NamedTuple):
    """The bytes of an object, or of a part of it, as they come."""

    chunks: Iterator[bytes]
    etag_is_digest: bool


class Sent(NamedTuple):
    """A part that the store has."""

    size: int  # bytes
    md5: bytes
    etag: str  # what the store calls it: the MD5, unless it encrypts


class UploadEnded(Exception):
    """An upload in parts that another process has ended, or mixed with its own."""


class Multipart(Protocol):
    """An object on its way to the store, in parts of `parts.part_size(size)` bytes."""

    there: dict[int, str]
    """ETags, by number from 1, of the parts that an earlier try has brought."""

    def put(self, number: int, data: bytes, md5: bytes) -> str:
        """Send a part; its ETag. Several threads may.

        Raises:
            UploadEnded: see there.
        """

    def complete(self, sent: list[Sent]) -> None:
        """Make the parts one object, which takes the place of an earlier one; raises as `put`."""


class ObjectStore(Protocol):
    """Objects by key; a prefix is the beginning of keys, with a final `/`.

    A put object is whole or absent. A failure is a StoreError, with S3's code where one fits, or
    an OSError; `failures.explained` tells the user. What may pass is tried again here.
    """

    def address(self, key: str) -> str:
        """`scheme://...` of an object or a prefix."""

    def claim(self, key: str) -> None:
        """Raise UserError where the object, or what is below the prefix, is not Lathe's to
        replace; decided before any change."""

    def stat(self, key: str) -> Stored | None:
        """The object, or None where there is none."""

    def list_below(self, prefix: str) -> dict[str, Stored]:
        """Every object below a prefix, by its name relative to it."""

    def has_any(self, prefix: str) -> bool:
        """Whether there is any object below a prefix."""

    def get(self, key: str) -> bytes:
        """A small object."""

    def open_range(self, stored: Stored, start: int, length: int) -> AbstractContextManager[Body]:
        """`length` bytes of an object from `start`, of that very ETag, in one attempt.

        Raises:
            StoreError: of code PreconditionFailed where the object is another by now.
        """

    def same_content(self, stored: Stored, path: Path) -> str | None:
        """The SHA-256 of a file that holds the same bytes as the object, else None."""

    def put(
        self, key: str, data: bytes, content_type: str = BINARY, if_match: str | None = None
    ) -> None:
        """Put an object of few bytes.

        Args:
            if_match: only in place of the object of this ETag, or of none where it is empty; else
                StoreError of code PreconditionFailed.
        """

    def multipart(self, key: str, size: int, resume: bool) -> AbstractContextManager[Multipart]:
        """Begin to put a large object, or with `resume` go on where an earlier try broke off."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""
