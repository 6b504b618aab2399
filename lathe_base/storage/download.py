"""Download from a store: ranges in parallel, an interrupted fetch resumed, then a rename."""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import Damaged, explained, retried
from lathe_base.storage.files import atomic_file, digest, require_relative, sha256
from lathe_base.storage.object_store import ObjectStore, Stored, open_store
from lathe_base.storage.objects import MARKER, RESERVED_NAMES, STAGE, from_json, is_unfinished
from lathe_base.storage.parts import Etag, in_order, is_md5, part_count, part_size, progress

MAX_SAVES = 256  # of a record during a download
SAVE_BYTES = 1 << 22


class _Record:
    """A file next to a partial download, with the identity of the object and the received bytes."""

    def __init__(self, work: Path, stored: Stored) -> None:
        self._work = work
        self._path = work.with_name(f"{work.name}.json")
        self._of = {"etag": stored.etag, "size": stored.size}
        self._lock = threading.Lock()
        self._every, self._unsaved = max(SAVE_BYTES, stored.size // MAX_SAVES), 0
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
                self._save()  # bytes that arrive after it are downloaded again after a kill

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
        os.ftruncate(file, size)  # parts are written at their places, in any order

        def get(part: int) -> bool:
            start = part * step
            return _get_part(store, stored, record, part, start, min(step, size - start), file)

        # A digest takes the parts in their order: they are yielded so, while later ones arrive.
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
            Code.CORRUPT,
        )
    # The ETag of several parts depends on their size: only that of our own uploads is known.
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


@dataclass(frozen=True)
class FileToFetch:
    """A file to fetch: its name below the folder, its object, and its SHA-256 if known."""

    name: str
    stored: Stored
    sha256: str | None


def fetch_stored(uri: str, folder: Path, only: Container[str] | None = None) -> Path:
    """Download an object or a prefix of a store; see `lathe_base.storage.fetch`."""
    store, key = open_store(uri)
    if not key.endswith("/") and (stored := store.stat(key)):
        name = require_relative(PurePosixPath(key).name, uri)
        _fetch(store, uri, [FileToFetch(name, stored, None)], folder)
        return folder / name
    below = _below(store, key.removesuffix("/") + "/", uri)
    _fetch(store, uri, [w for w in below if only is None or w.name in only], folder)
    return folder


def sizes_below(uri: str) -> dict[str, int]:
    """Bytes of the files below a prefix, by name; empty if it is the address of an object.

    Raises:
        UserError: nothing there, or `fetch` would reject it.
    """
    with explained(uri):
        store, key = open_store(uri)
        if not key.endswith("/") and store.stat(key):
            return {}
        below = _below(store, key.removesuffix("/") + "/", uri)
    return {wanted.name: wanted.stored.size for wanted in below}


def _below(store: ObjectStore, prefix: str, uri: str) -> list[FileToFetch]:
    """The files of a prefix: those that its manifest lists or, without one, every object."""
    below = store.list_below(prefix)
    if not below:
        what = "no objects below it" if uri.endswith("/") else "not found (NoSuchKey)"
        raise UserError(f"{uri}: {what}", "check the bucket and the prefix", Code.NOT_FOUND)
    if is_unfinished(below):
        raise UserError(
            f"{uri}: an upload to it is unfinished",
            "wait for it, or run the upload again",
            Code.INCOMPLETE,
        )
    if MARKER not in below:
        return [
            FileToFetch(require_relative(name, store.address(stored.key)), stored, None)
            for name, stored in below.items()
            if name not in RESERVED_NAMES
        ]
    files = from_json(store.get(prefix + MARKER), store.address(prefix + MARKER))
    for name, entry in files.items():
        stored = below.get(name)
        if stored is None or stored.size != entry.size:
            actual = "absent" if stored is None else f"{stored.size} bytes"
            raise UserError(
                f"{uri}: corrupt: {name} is {actual}, but {MARKER} says {entry.size} bytes",
                "upload the folder again",
                Code.CORRUPT,
            )
    return [FileToFetch(name, below[name], entry.sha256) for name, entry in files.items()]


def _fetch(store: ObjectStore, uri: str, wanted: list[FileToFetch], folder: Path) -> None:
    with _stage(folder) as stage:
        # What an earlier fetch has downloaded whole, according to its digest, is not fetched again.
        missing = [
            w
            for w in wanted
            if w.sha256 is None
            or not (target := folder / w.name).is_file()
            or target.stat().st_size != w.stored.size
            or sha256(target) != w.sha256
        ]
        work = {w.name: stage / digest(store.address(w.stored.key))[:32] for w in missing}
        # What an interrupted fetch has downloaded takes its space already.
        there = sum(path.stat().st_blocks * 512 for path in work.values() if path.exists())
        needed, free = sum(w.stored.size for w in missing) - there, shutil.disk_usage(stage).free
        if needed > free:
            raise UserError(
                f"{uri}: needs {needed / 1e9:.3g} GB, and {folder} has {free / 1e9:.3g} GB free",
                "free some space, or give a folder on a larger disk",
                Code.NO_SPACE,
            )
        with progress(f"fetch {uri}", sum(w.stored.size for w in missing)) as p:

            def get_small(w: FileToFetch) -> int:
                def nothing(size: int) -> None:
                    """Do nothing: only one thread may draw the bar."""

                get_file(store, w.stored, w.sha256, work[w.name], nothing)
                return w.stored.size

            small = [w for w in missing if part_count(w.stored.size) <= 1]
            # Small files in parallel, then large ones one after the other, each in parallel parts.
            for size in in_order(get_small, small):
                p.advance(size)
            for w in missing:
                if part_count(w.stored.size) > 1:
                    get_file(store, w.stored, w.sha256, work[w.name], p.advance)
        # Files appear in the folder only when all have arrived.
        for w in missing:
            target = folder / w.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(work[w.name], target)
        shutil.rmtree(stage)


@contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder in `folder` for partial downloads, locked for one process at a time.

    After a failure it is kept, unless it is empty, so that the next fetch can resume.
    """
    stage = folder / STAGE
    while True:
        stage.mkdir(parents=True, exist_ok=True)
        handle = os.open(stage, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not stage.exists() or stage.stat().st_ino != os.fstat(handle).st_ino:
                continue  # the previous holder has finished and removed it
            try:
                yield stage
            finally:
                if stage.exists() and not any(stage.iterdir()):
                    stage.rmdir()
            return
        finally:
            os.close(handle)
