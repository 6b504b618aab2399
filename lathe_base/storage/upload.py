"""Upload to a store: parts in parallel, an interrupted upload resumed, the marker last."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import MISSING, StoreError, explained
from lathe_base.storage.files import require_relative
from lathe_base.storage.object_store import (
    JSON,
    Multipart,
    ObjectStore,
    Sent,
    Stored,
    UploadEnded,
    open_store,
)
from lathe_base.storage.objects import (
    MARKER,
    RESERVED_NAMES,
    STAGE,
    UNFINISHED,
    Entry,
    mark_unfinished,
    to_json,
)
from lathe_base.storage.parts import in_order, part_count, part_size, progress

MAX_TRIES = 3  # of a multipart upload that another process interferes with


def upload(path: Path, uri: str) -> None:
    """Upload a file to an object, or a folder to a prefix, whose marker then lists all its files.

    Earlier content of the prefix is replaced: from the first change until the marker is put, a
    reader finds nothing there. Objects, and parts of large ones, that an interrupted upload has
    left are not sent again if their digests match. Every request carries the digest of its body,
    which the store checks, and the digest in the store's answer is checked here. Empty folders are
    omitted, because stores have none.

    Raises:
        UserError: no such file, access denied, no bucket, no answer, the store received different
            bytes, or the file or the prefix changed in the meantime.
    """
    with explained(uri, path):
        store, key = open_store(uri)
        if path.is_dir():
            _put_folder(store, key.removesuffix("/") + "/", path)
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder", "check the path", Code.NOT_FOUND)
        elif key.endswith("/"):
            raise UserError(
                f"{uri}: a prefix, but {path} is a file",
                "give the full key of the object",
                Code.BAD_PATH,
            )
        else:
            store.claim(key)
            with progress(f"upload {uri}", path.stat().st_size) as p:
                _put_file(store, key, path, store.stat(key), p.advance)


def _put_folder(store: ObjectStore, prefix: str, folder: Path) -> None:
    where = store.address(prefix)
    files = _files(folder)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    store.claim(prefix)
    # From here on until the marker is put, readers find nothing at the prefix.
    token = mark_unfinished(store, prefix)
    before = store.list_below(prefix)
    store.delete([prefix + n for n in before if n not in {*files, *RESERVED_NAMES}])
    entries: dict[str, Entry] = {}
    with progress(f"upload {where}", sum(sizes.values())) as p:

        def put_small(name: str) -> tuple[str, Entry]:
            def nothing(size: int) -> None:
                """Do nothing: only one thread may draw the bar."""

            return name, _put_file(store, prefix + name, files[name], before.get(name), nothing)

        # Small files in parallel, then large ones one after the other, each in parallel parts.
        for name, entry in in_order(put_small, [n for n in files if part_count(sizes[n]) <= 1]):
            entries[name] = entry
            p.advance(entry.size)
        for name in files:
            if name not in entries:
                entries[name] = _put_file(
                    store, prefix + name, files[name], before.get(name), p.advance
                )
    # The marker makes the prefix readable. Another upload that has begun since has its own token
    # there, or none if it has finished: its marker must not list these files.
    try:
        current = store.get(prefix + UNFINISHED).decode()
    except StoreError as error:
        if error.code not in MISSING:
            raise
        current = ""
    if current != token:
        raise UserError(
            f"{where}: another upload to it has started", "run one upload at a time", Code.IN_USE
        )
    store.put(prefix + MARKER, to_json(entries).encode(), JSON)
    store.delete([prefix + UNFINISHED])


def _put_file(
    store: ObjectStore,
    key: str,
    path: Path,
    there: Stored | None,
    advance: Callable[[int], None],
) -> Entry:
    """Upload one file, unless the object that is `there` has the same bytes."""
    size = path.stat().st_size
    if there and there.size == size and (same := store.same_content(there, path)):
        advance(size)
        return Entry(size, same)
    if part_count(size) <= 1:
        data = path.read_bytes()
        store.put(key, data)
        advance(len(data))
        return Entry(len(data), hashlib.sha256(data).hexdigest())
    # Another process may mistake this for an interrupted upload and continue it with other bytes:
    # the store then rejects one of the two, which starts again.
    for attempt in range(MAX_TRIES):
        try:
            with store.multipart(key, size, resume=attempt == 0) as upload:
                sha256, sent = _send(upload, path, size, advance)
                upload.complete(sent)
            return Entry(size, sha256)
        except UploadEnded:
            # The other process may have uploaded the same bytes.
            now = store.stat(key)
        if now and now.size == size and (same := store.same_content(now, path)):
            return Entry(size, same)
    raise UserError(
        f"{store.address(key)}: another upload is writing to it",
        "run one upload at a time",
        Code.IN_USE,
    )


def _send(
    upload: Multipart, path: Path, size: int, advance: Callable[[int], None]
) -> tuple[str, list[Sent]]:
    """Upload the parts that are missing; return the file's SHA-256, and all its parts."""
    digest = hashlib.sha256()

    # Runs in this thread only, so the digest gets the parts in their order.
    def parts() -> Iterator[tuple[int, bytes]]:
        with path.open("rb") as file:
            for number in range(1, part_count(size) + 1):
                data = file.read(part_size(size))
                digest.update(data)
                yield number, data
            if file.tell() != size or file.read(1):
                raise UserError(
                    f"{path}: it changed during the upload",
                    "wait until it is complete",
                    Code.CHANGED,
                )

    def send(item: tuple[int, bytes]) -> Sent:
        number, data = item
        md5 = hashlib.md5(data).digest()
        etag = upload.there.get(number)
        if etag != md5.hex():
            etag = upload.put(number, data, md5)
        return Sent(len(data), md5, etag)

    sent = []
    for part in in_order(send, parts()):
        advance(part.size)
        sent.append(part)
    return digest.hexdigest(), sent


def _files(folder: Path) -> dict[str, Path]:
    """Every file below the folder by its name relative to it, with `/`."""
    files: dict[str, Path] = {}

    def fail(error: OSError) -> None:
        raise error  # which `os.walk` would skip: a folder without permission would be left out

    if (folder / STAGE).exists():
        raise UserError(
            f"{folder}: a download into it is unfinished", "run the download again", Code.INCOMPLETE
        )
    for parent, folders, names in os.walk(folder, onerror=fail):
        for name in folders:
            if (link := Path(parent, name)).is_symlink():
                raise UserError(
                    f"{link}: a link to a folder",
                    "replace the link with the folder itself",
                    Code.WRONG_KIND,
                )
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if relative in RESERVED_NAMES:
                continue
            if not path.is_file():
                raise UserError(
                    f"{path}: not a file", "remove it, or fix the link", Code.WRONG_KIND
                )
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{path!r}: its name is not UTF-8", "rename it", Code.BAD_PATH
                ) from None
            files[require_relative(relative, str(folder))] = path
    if not files:
        raise UserError(f"{folder}: contains no files", "give a folder with files", Code.INCOMPLETE)
    return dict(sorted(files.items()))
