"""The interface of an object store, and the table of stores.

Each store has its own file and a line in `STORES`; only this module knows the schemes.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from lathe_base.errors import Code, UserError

BINARY, JSON = "application/octet-stream", "application/json"

STORES = {
    "s3": "lathe_base.storage.s3",
    "minio": "lathe_base.storage.s3",
    "file": "lathe_base.storage.local",
}
"""The module of each scheme, imported when it is first needed; its `open_store` takes an address
and returns the store and the key."""


@dataclass(frozen=True)
class Stored:
    """An object as the store lists it."""

    key: str
    size: int  # bytes
    etag: str  # changes with the bytes; S3's digest (see `parts.Etag`) if it is one
    time: datetime
    part_bytes: str | None = None  # part size of its ETag, if Lathe put it; only from `stat`


class Body(NamedTuple):
    """A stream of the bytes of an object, or of a range of it."""

    chunks: Iterator[bytes]
    etag_is_digest: bool


class Sent(NamedTuple):
    """A part that the store has received."""

    size: int  # bytes
    md5: bytes
    etag: str  # the store's: the MD5, unless the store encrypts


class UploadEnded(Exception):
    """Another process has ended this multipart upload, or added its own parts to it."""


class Multipart(Protocol):
    """A multipart upload of an object, in parts of `parts.part_size(size)` bytes."""

    there: dict[int, str]
    """ETags, by part number from 1, of the parts that an earlier attempt has uploaded."""

    def put(self, number: int, data: bytes, md5: bytes) -> str:
        """Upload a part and return its ETag; safe to call from several threads.

        Raises:
            UploadEnded: another process has interfered with the upload.
        """

    def complete(self, sent: list[Sent]) -> None:
        """Join the parts into one object, which replaces an earlier one; raises as `put` does."""


class ObjectStore(Protocol):
    """Objects by key; a prefix is the beginning of keys, with a final `/`.

    A put is atomic. A failure is a StoreError, with S3's code if one fits, or an OSError;
    `failures.explained` explains it to the user. Each store retries its transient failures.
    """

    def address(self, key: str) -> str:
        """The address `scheme://...` of an object or a prefix."""

    def claim(self, key: str) -> None:
        """Raise UserError, before any change, if Lathe may not replace the object, or what is
        below the prefix."""

    def stat(self, key: str) -> Stored | None:
        """The object, or None if there is none."""

    def list_below(self, prefix: str) -> dict[str, Stored]:
        """Every object below a prefix, by its name relative to it."""

    def has_any(self, prefix: str) -> bool:
        """Whether there is any object below a prefix."""

    def get(self, key: str) -> bytes:
        """The bytes of a small object."""

    def open_range(self, stored: Stored, start: int, length: int) -> AbstractContextManager[Body]:
        """Stream `length` bytes of an object from `start`, in one attempt.

        Raises:
            StoreError: with code PreconditionFailed if the object has another ETag by now.
        """

    def same_content(self, stored: Stored, path: Path) -> str | None:
        """The SHA-256 of the file if it has the same bytes as the object, else None."""

    def put(
        self, key: str, data: bytes, content_type: str = BINARY, if_match: str | None = None
    ) -> None:
        """Put a small object.

        Args:
            if_match: put only if the object has this ETag or, if empty, does not exist; otherwise
                raise StoreError with code PreconditionFailed.
        """

    def multipart(self, key: str, size: int, resume: bool) -> AbstractContextManager[Multipart]:
        """Start the upload of a large object, or with `resume` continue an interrupted one."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""


def uri_scheme(uri: str) -> str:
    """The text before the first colon, in lower case; empty without a colon. `urlsplit` would raise
    an error if what follows is malformed."""
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon else ""


def is_store(uri: str) -> bool:
    """Whether `uri` is, or is meant to be, an address in an object store."""
    return uri_scheme(uri) in STORES


def open_store(uri: str) -> tuple[ObjectStore, str]:
    """The store and the key of an address.

    Raises:
        UserError: not an address, or the store's settings are wrong.
    """
    scheme = uri_scheme(uri)
    if scheme not in STORES:  # not shown whole: it may have a signature
        raise UserError(
            f"{scheme or 'a path'}: not the address of an object in a store",
            f"write one that begins with {', '.join(f'{name}://' for name in STORES)}",
            Code.BAD_PATH,
        )
    store, key = import_module(STORES[scheme]).open_store(uri)
    return store, key
