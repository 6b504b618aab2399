"""Download one object to one file: ranges in parallel, and a record of what has arrived."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from lathe_base.errors import UserError
from lathe_base.storage.failures import Damaged, retried
from lathe_base.storage.files import atomic_file
from lathe_base.storage.manifest import MARKER
from lathe_base.storage.object_store import ObjectStore, Stored
from lathe_base.storage.parallel import in_order
from lathe_base.storage.parts import Etag, is_md5, part_count, part_size

SAVES = 256  # most saves of a record during a download
SAVE_BYTES = 1 << 22


class _Record:
    """A file next to a partial download, with the identity of the object and the received bytes."""

    def __init__(self, work: Path, stored: Stored) -> None:
        self._work = work
        self._path = work.with_name(f"{work.name}.json")
        self._of = {"etag": stored.etag, "size": stored.size}
        self._lock = threading.Lock()
        self._every, self._unsaved = max(SAVE_BYTES, stored.size // SAVES), 0
        self.arrived = [0] * part_count(stored.size)  # bytes, by part
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if work.exists() and saved["of"] == self._of:
                self.arrived = [int(count) for count in saved["arrived"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def add(self, part: int, count: int) -> None:
        with self._lock:
            self.arrived[part] += count
            self._unsaved += count
            if self._unsaved >= self._every:
                self._save()

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        self._unsaved = 0
        with atomic_file(self._path) as new:
            new.write_text(json.dumps({"of": self._of, "arrived": self.arrived}), encoding="utf-8")

    def drop(self) -> None:
        """Delete the record and the partial download."""
        self._path.unlink(missing_ok=True)
        self._work.unlink(missing_ok=True)


def get_file(
    store: ObjectStore,
    stored: Stored,
    sha256: str | None,
    work: Path,
    advance: Callable[[int], None],
) -> None:
    """Download an object to the file `work`, resume a partial download, and check the digest.

    Args:
        sha256: from the manifest; without one the ETag is checked, if it is a digest.

    Raises:
        UserError: the digest differs from the manifest's.
        StoreError: the object has changed in the meantime, or the store failed.
        Damaged: the digest differs from the ETag's.
    """
    record = _Record(work, stored)
    size, step = stored.size, part_size(stored.size)
    etag_is_digest = is_md5(stored.etag)
    in_parts = "-" in stored.etag
    digest, etag = hashlib.sha256(), Etag(in_parts)
    file = os.open(work, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(file, size)

        def get(part: int) -> bool:
            start = part * step
            return _get_part(store, stored, record, part, start, min(step, size - start), file)

        parts = range(part_count(size))
        for part, known in enumerate(in_order(get, parts) if size > step else map(get, parts)):
            etag_is_digest &= known
            data = os.pread(file, step, part * step)
            digest.update(data) if sha256 else etag.update(data)
            advance(len(data))
    except BaseException:
        record.save()
        raise
    finally:
        os.close(file)
    if sha256 and digest.hexdigest() != sha256:
        record.drop()
        raise UserError(
            f"{store.address(stored.key)}: corrupt: its SHA-256 differs from the one in {MARKER}",
            "upload the folder again",
        )
    of_our_parts = stored.part_bytes == str(step)
    checkable = not sha256 and etag_is_digest and in_parts <= of_our_parts
    if checkable and stored.etag != etag.text():
        record.drop()
        raise Damaged(
            f"the received bytes have the ETag {etag.text()}, but the object has {stored.etag}"
        )


@retried
def _get_part(
    store: ObjectStore,
    stored: Stored,
    record: _Record,
    part: int,
    start: int,
    length: int,
    file: int,
) -> bool:
    """Download the missing bytes of [start, start + length) to the same position in an open file.

    Returns:
        Whether the ETag can be a digest of the bytes.
    """
    if record.arrived[part] == length:
        return True
    at = start + record.arrived[part]
    with store.open_range(stored, at, start + length - at) as body:
        for chunk in body.chunks:
            if at + len(chunk) > start + length:
                raise Damaged("the store sent more bytes than requested")
            left = memoryview(chunk)
            while left:
                written = os.pwrite(file, left, at)
                left, at = left[written:], at + written
                record.add(part, written)
        if at != start + length:
            raise Damaged(f"the store sent {at - start} of {length} bytes")
        return body.etag_is_digest
