"""A folder as an object store: `file:///srv/releases`, with names written as they are.

An object is a file, written under a hidden name in its folder and then renamed. The journal
`.lathe.store` in the root of a store lists every file that Lathe has put below it, with its digest.
Nothing else is ever replaced or removed, because a folder, unlike a bucket, may contain the user's
own files.
"""

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import StoreError, shown
from lathe_base.storage.files import digest, once, remember, require_relative
from lathe_base.storage.object_store import BINARY, Body, Sent, Stored
from lathe_base.storage.objects import STAGE
from lathe_base.storage.ownership import existing_parent, foreign_files_error, require_writable
from lathe_base.storage.parts import Etag, part_size, same_content

JOURNAL = ".lathe.store"
TEMPORARY = ".lathe.put-"
READ_BYTES = 1 << 20


def open_store(uri: str) -> tuple["LocalStore", str]:
    """The store of this machine's files, and the path without its first `/` as the key.

    Raises:
        UserError: not an absolute path, or one with `..`.
    """
    path = uri.partition(":")[2]
    if not path.startswith("///") or path == "///":
        raise UserError(
            f"{shown(uri)}: not the address of a file or folder",
            "write file:///path",
            Code.BAD_PATH,
        )
    require_relative(path[3:].removesuffix("/"), shown(uri))
    return LocalStore(), path[3:]


class LocalStore:
    """See `ObjectStore` for the methods; the ETag is the state of the file, not a digest."""

    def address(self, key: str) -> str:
        return f"file:///{key}"

    def claim(self, key: str) -> None:
        path = _path(key)
        if key.endswith("/") and path.exists() and not path.is_dir():
            raise UserError(
                f"{self.address(key)}: {path} is a file", "give another address", Code.WRONG_KIND
            )
        paths = list(_files_below(path)) if path.is_dir() else [path]
        if foreign := [p for p in paths if os.path.lexists(p) and not _is_ours(p)]:
            folder = path if path.is_dir() else path.parent
            names = sorted(p.relative_to(folder).as_posix() for p in foreign)
            raise foreign_files_error(folder, names)
        require_writable(existing_parent(path), path)

    def stat(self, key: str) -> Stored | None:
        path = _path(key)
        return _stored(key, path.stat()) if path.is_file() else None

    def list_below(self, prefix: str) -> dict[str, Stored]:
        folder = _path(prefix)
        objects = {}
        for path in _files_below(folder):
            name = path.relative_to(folder).as_posix()
            with suppress(FileNotFoundError):  # removed meanwhile
                objects[name] = _stored(prefix + name, path.stat())
        return objects

    def has_any(self, prefix: str) -> bool:
        return any(True for _ in _files_below(_path(prefix)))

    def get(self, key: str) -> bytes:
        if not (path := _path(key)).is_file():
            raise StoreError(f"{path}: no such file", "NoSuchKey")
        return path.read_bytes()

    @contextmanager
    def open_range(self, stored: Stored, start: int, length: int) -> Iterator[Body]:
        path = _path(stored.key)
        if not path.is_file():
            raise StoreError(f"{path}: no such file", "PreconditionFailed")
        with path.open("rb") as file:
            # Compared before the first byte and after the last: it may change in between.
            def require_same() -> None:
                if _etag(os.fstat(file.fileno())) != stored.etag:
                    raise StoreError(f"{path}: changed", "PreconditionFailed")

            def chunks() -> Iterator[bytes]:
                left = length
                while left and (data := file.read(min(left, READ_BYTES))):
                    left -= len(data)
                    yield data
                require_same()

            require_same()
            file.seek(start)
            yield Body(chunks(), etag_is_digest=False)

    def same_content(self, stored: Stored, path: Path) -> str | None:
        sha256 = hashlib.sha256()
        with _path(stored.key).open("rb") as one, path.open("rb") as other:
            while data := other.read(READ_BYTES):
                if one.read(READ_BYTES) != data:
                    return None
                sha256.update(data)
            return None if one.read(1) else sha256.hexdigest()

    def put(
        self, key: str, data: bytes, content_type: str = BINARY, if_match: str | None = None
    ) -> None:
        path = _path(key)
        work, file = _create(path)
        with _closing(file):
            try:
                _write(file, data, 0)
                self._publish(work, path, hashlib.md5(data).hexdigest(), if_match)
            finally:
                work.unlink(missing_ok=True)

    @contextmanager
    def multipart(self, key: str, size: int, resume: bool) -> Iterator["LocalMultipart"]:
        path = _path(key)
        work, file = (resume and _interrupted_upload(path, size)) or _create(path, size)
        with _closing(file):
            yield LocalMultipart(self, path, size, work, file)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [path for path in map(_path, keys) if os.path.lexists(path)]
        for path in paths:
            with _journal(path):
                _require_ours(path)
                path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            _prune(folder)

    def _publish(self, work: Path, path: Path, etag: str, if_match: str | None = None) -> None:
        """Record the file `work` in the journal, then rename it to `path`."""
        with _journal(path) as journal:
            stat = self.stat(path.as_posix().removeprefix("/"))
            if if_match is not None and (stat.etag if stat else "") != if_match:
                raise StoreError(f"{path}: changed", "PreconditionFailed")
            if os.path.lexists(path):
                _require_ours(path)
            # First the journal, then the file: if this process is killed in between, a line fits no
            # file, whereas a file without a line would never be replaced. The line break comes
            # first, because the line before may be incomplete.
            record = {"name": path.relative_to(journal.folder).as_posix(), "etag": etag}
            _write(journal.file, f"\n{json.dumps(record)}".encode(), journal.size)
            os.replace(work, path)
        remember(path, etag)


class LocalMultipart:
    """See `Multipart`: a hidden file with each part at its offset, locked by its writer."""

    def __init__(self, store: LocalStore, path: Path, size: int, work: Path, file: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._work, self._file = work, file
        # Parts that an earlier attempt has written: one that is incomplete, or a hole in the file,
        # has another digest than the part to send, and is sent again.
        step, there = part_size(size), os.fstat(file).st_size
        self.there = {
            number + 1: hashlib.md5(os.pread(file, step, number * step)).hexdigest()
            for number in range(-(-there // step))
        }

    def put(self, number: int, data: bytes, md5: bytes) -> str:
        _write(self._file, data, (number - 1) * part_size(self._size))
        return md5.hex()

    def complete(self, sent: list[Sent]) -> None:
        etag = Etag(in_parts=True)
        for part in sent:
            etag.add(part.md5)
        os.ftruncate(self._file, self._size)
        self._store._publish(self._work, self._path, etag.text())


class _Journal:
    """An open, locked journal, and the root folder of its store."""

    def __init__(self, folder: Path, file: int) -> None:
        self.folder, self.file, self.size = folder, file, os.fstat(file).st_size


def _path(key: str) -> Path:
    return Path("/", key)


def _etag(state: os.stat_result) -> str:
    fields = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return ".".join(f"{field:x}" for field in fields)


def _stored(key: str, state: os.stat_result) -> Stored:
    return Stored(
        key, state.st_size, _etag(state), datetime.fromtimestamp(state.st_mtime_ns / 1e9, UTC)
    )


def _files_below(folder: Path) -> Iterator[Path]:
    """The file of every object below a folder.

    Raises:
        UserError: there is an unfinished download, a link to a folder, a pipe or the like.
    """
    if (folder / STAGE).exists():
        raise UserError(
            f"{folder}: a download into it is unfinished", "run the download again", Code.INCOMPLETE
        )

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        for link in (Path(parent, name) for name in folders):
            if link.is_symlink():
                raise UserError(
                    f"{link}: a link to a folder",
                    "replace the link with the folder itself",
                    Code.WRONG_KIND,
                )
        for path in (Path(parent, name) for name in names):
            if path.name == JOURNAL or path.name.startswith(TEMPORARY):
                continue
            if not path.is_file() and os.path.lexists(path):
                raise UserError(
                    f"{path}: not a file", "remove it, or fix the link", Code.WRONG_KIND
                )
            yield path


def _is_ours(path: Path) -> bool:
    """Whether the store's journal lists the file with the digest of its bytes."""
    if path.is_symlink() or not path.is_file():
        return False

    def has_etag(etag: str, path: Path) -> bool:
        return same_content(path, etag) is not None

    # Every put adds a line to the journal, and any of them counts: if a put was killed before its
    # rename, the last line is of a file that never appeared. Stores may be inside each other.
    recorded = {
        etag
        for folder in path.parents
        if (folder / JOURNAL).is_file()
        for name, etag in _records(folder)
        if name == path.relative_to(folder).as_posix()
    }
    return any(once(path, etag, partial(has_etag, etag)) for etag in recorded)


def _require_ours(path: Path) -> None:
    if os.path.lexists(path) and not _is_ours(path):
        raise foreign_files_error(path.parent, [path.name])


def _records(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and ETag of each object that a journal lists."""
    for line in (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # an incomplete line of a killed process
            record = json.loads(line)
            yield str(record["name"]), str(record["etag"])


@contextmanager
def _journal(path: Path) -> Iterator[_Journal]:
    """Open and lock the journal of the store that `path` is in; create a store if there is none."""
    while True:
        # The folder with a journal, or else the first one to create, which is the root of a new
        # store.
        roots = (folder for folder in path.parents if (folder / JOURNAL).is_file())
        missing = [folder for folder in path.parents if not folder.exists()]
        folder = next(roots, missing[-1] if missing else path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(folder / JOURNAL, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another process has just removed the empty store
        with _closing(file):
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever had the lock before may have removed the empty store, and with it this file.
            if os.fstat(file).st_nlink and path.parent.is_dir():
                yield _Journal(folder, file)
                return


def _create(path: Path, size: int | None = None) -> tuple[Path, int]:
    """Create, open and lock a hidden file next to `path`, whose name contains the size, for
    resuming."""
    with _journal(path):
        while True:
            work = path.with_name(f"{_hidden(path, size)}{uuid.uuid4().hex[:8]}")
            file = os.open(work, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if _try_lock(file, work):
                return work, file


def _interrupted_upload(path: Path, size: int) -> tuple[Path, int] | None:
    """An interrupted upload of a file of this size, open and locked."""
    for work in path.parent.glob(f"{_hidden(path, size)}*"):
        with suppress(FileNotFoundError):
            file = os.open(work, os.O_RDWR)
            if _try_lock(file, work):
                return work, file
    return None


def _hidden(path: Path, size: int | None) -> str:
    kind = "whole" if size is None else f"parts-{size}"
    return f"{TEMPORARY}{digest(path.name)[:16]}-{kind}-"


def _try_lock(file: int, work: Path) -> bool:
    """Lock an open file; close it if another process has locked, renamed or removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if work.exists() and work.stat().st_ino == os.fstat(file).st_ino:
            return True
    except BlockingIOError:
        pass
    os.close(file)
    return False


@contextmanager
def _closing(file: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(file)


def _write(file: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written


def _prune(parent: Path) -> None:
    """Remove the folders that a deleted object leaves empty, up to the root of its store."""
    for folder in (parent, *parent.parents):
        with suppress(OSError):
            # Leftovers of killed uploads, which nobody holds a lock on, do not keep a folder.
            left = [path for path in folder.iterdir() if path.name != JOURNAL]
            if all(path.name.startswith(TEMPORARY) for path in left):
                for work in left:
                    file = os.open(work, os.O_RDWR)
                    if _try_lock(file, work):
                        work.unlink()
                        os.close(file)
            if (folder / JOURNAL).exists():
                file = os.open(folder / JOURNAL, os.O_RDWR)
                with _closing(file):
                    fcntl.flock(file, fcntl.LOCK_EX)
                    if not any((folder / name).exists() for name, _ in _records(folder)):
                        (folder / JOURNAL).unlink()
                        folder.rmdir()
                return
            folder.rmdir()
        if folder.exists():
            return
