"""To the store: parts in parallel, going on where an earlier upload broke off, the marker last."""

import base64
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from minio import Minio
from minio.datatypes import Part
from minio.error import MinioException

from lathe.errors import UserError
from lathe.storage.failures import Damaged, explained, retried, status
from lathe.storage.manifest import (
    MARKER,
    OWN_NAMES,
    STAGE,
    UNFINISHED,
    Entry,
    require_relative,
    to_json,
)
from lathe.storage.parallel import in_order, progress
from lathe.storage.parts import (
    PART_BYTES_HEADER,
    Etag,
    part_count,
    part_size,
    same_content,
    says_other,
)
from lathe.storage.s3 import (
    Stored,
    begin_change,
    endpoint,
    get_text,
    list_below,
    parse,
    put_text,
    remove_keys,
    s3_client,
    stat,
)

# Answers to an upload in parts that another one has ended, or mixed with its own.
ENDED = {"404", "NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"}
ENDED |= {"NotImplemented"}  # rclone: a part of other bytes than were sent before
TRIES = 3  # of such an upload
COMPLETE_SECONDS = 300.0  # a store may copy all parts before it answers


class Sent(NamedTuple):
    """A part that the store has."""

    size: int  # bytes
    md5: bytes
    etag: str  # what the store calls it: the MD5, unless it encrypts


def upload(path: Path, uri: str) -> None:
    """Put a file to an object, or a folder to a prefix, whose marker then names all it holds.

    An earlier content of the prefix is replaced: from the first change until the marker is put,
    a reader finds nothing there. What a broken upload has left, whole objects and parts of big
    ones, is not sent again where its digest is right. Every request carries the digest of its
    body, which the store checks, and the store's own digest in the answer is checked here. Empty
    folders are not kept: a store has none.

    Raises:
        UserError: no such file, refused, no bucket, no answer, the store holds something else
            than what was sent, the file or the prefix changed meanwhile.
    """
    bucket, key = parse(uri)
    with explained(uri, path):
        if path.is_dir():
            _put_folder(s3_client(), bucket, key.removesuffix("/") + "/", path)
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder", "check the path")
        elif key.endswith("/"):
            raise UserError(f"{uri}: a prefix, and {path} is a file", "give the object's whole key")
        else:
            client = s3_client()
            with progress(f"upload {uri}", path.stat().st_size) as p:
                _put_file(client, bucket, key, path, stat(client, bucket, key), p.advance)


def _put_folder(client: Minio, bucket: str, prefix: str, folder: Path) -> None:
    where = f"s3://{bucket}/{prefix}"
    files = _files(folder)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    token = begin_change(client, bucket, prefix)
    before = list_below(client, bucket, prefix)
    remove_keys(client, bucket, [prefix + n for n in before if n not in {*files, *OWN_NAMES}])
    entries: dict[str, Entry] = {}
    with progress(f"upload {where}", sum(sizes.values())) as p:

        def put_small(name: str) -> tuple[str, Entry]:
            def nothing(size: int) -> None:
                """A bar is drawn by one thread only."""

            return name, _put_file(
                client, bucket, prefix + name, files[name], before.get(name), nothing
            )

        for name, entry in in_order(put_small, [n for n in files if part_count(sizes[n]) <= 1]):
            entries[name] = entry
            p.advance(entry.size)
        for name in files:
            if name not in entries:
                entries[name] = _put_file(
                    client, bucket, prefix + name, files[name], before.get(name), p.advance
                )
    if get_text(client, bucket, prefix + UNFINISHED) != token:
        raise UserError(
            f"{where}: another upload to it began meanwhile", "let one at a time write there"
        )
    put_text(client, bucket, prefix + MARKER, to_json(entries))
    remove_keys(client, bucket, [prefix + UNFINISHED])


def _files(folder: Path) -> dict[str, Path]:
    """Every file below the folder by its name relative to it, with `/`."""
    found: dict[str, Path] = {}
    if (folder / STAGE).exists():
        raise UserError(f"{folder}: a fetch into it has not ended", "run the fetch again")
    for parent, folders, names in os.walk(folder, onerror=_raise):
        for name in folders:
            if (link := Path(parent, name)).is_symlink():
                raise UserError(f"{link}: a link to a folder", "put the folder itself there")
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if relative in OWN_NAMES:
                continue
            if not path.is_file():
                raise UserError(f"{path}: not a file", "remove it, or mend the link")
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise UserError(f"{path!r}: its name is not UTF-8", "rename it") from None
            found[require_relative(relative, str(folder))] = path
    if not found:
        raise UserError(f"{folder}: no file in it", "give a folder with files")
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def _put_file(
    client: Minio,
    bucket: str,
    key: str,
    path: Path,
    there: Stored | None,
    advance: Callable[[int], None],
) -> Entry:
    """Put one file, unless what is `there` is the same."""
    size = path.stat().st_size
    if there and there.size == size and (sha256 := same_content(path, there.etag)):
        advance(size)
        return Entry(size, sha256)
    if part_count(size) > 1:
        return Entry(size, _put_parts(client, bucket, key, path, size, advance))
    data = path.read_bytes()
    _put(client, bucket, key, data, hashlib.md5(data).digest())
    advance(len(data))
    return Entry(len(data), hashlib.sha256(data).hexdigest())


@retried
def _put(
    client: Minio,
    bucket: str,
    key: str,
    data: bytes,
    md5: bytes,
    part: dict[str, str | list[str] | tuple[str]] | None = None,
) -> str:
    """Put one body, `part` of an object or all of it; the ETag that the store gives it."""
    headers: dict[str, str | list[str] | tuple[str]] = {}
    if endpoint().scheme == "https":  # else the client signs the body's SHA-256
        headers["Content-MD5"] = base64.b64encode(md5).decode()
    # The public put_object aborts what breaks off; only this request leaves it to go on with.
    answer = client._put_object(bucket, key, data, headers, part)
    if says_other(answer.etag or "", md5.hex(), answer.http_headers):
        raise Damaged(f"the store holds {answer.etag}, sent was {md5.hex()} (MD5)")
    return answer.etag or ""


def _put_parts(
    client: Minio, bucket: str, key: str, path: Path, size: int, advance: Callable[[int], None]
) -> str:
    """Put a file in parts; its SHA-256.

    Another process may take these for a broken upload and go on with them, with other bytes: the
    store then refuses one of the two, which begins anew.
    """
    for attempt in range(TRIES):
        upload_id, there = (_broken_off(client, bucket, key) if attempt == 0 else None) or ("", {})
        try:
            upload_id = upload_id or _begin(client, bucket, key, size)
            sha256, sent = _send(client, bucket, key, upload_id, path, size, there, advance)
            _complete(bucket, key, upload_id, sent)
            return sha256
        except MinioException as error:
            if status(error) not in ENDED:
                raise
        now = stat(client, bucket, key)
        if now and now.size == size and (found := same_content(path, now.etag)):
            return found
    raise UserError(
        f"s3://{bucket}/{key}: another upload writes there", "let one at a time do it, then again"
    )


def _send(
    client: Minio,
    bucket: str,
    key: str,
    upload_id: str,
    path: Path,
    size: int,
    there: dict[int, str],
    advance: Callable[[int], None],
) -> tuple[str, list[Sent]]:
    """Send the parts that are not `there` (ETags by number); the SHA-256 of all."""
    digest = hashlib.sha256()

    def parts() -> Iterator[tuple[int, bytes]]:
        with path.open("rb") as file:
            for number in range(1, part_count(size) + 1):
                data = file.read(part_size(size))
                digest.update(data)
                yield number, data
            if file.tell() != size or file.read(1):
                raise UserError(f"{path}: it changes while it is read", "wait until it is written")

    def send(item: tuple[int, bytes]) -> Sent:
        number, data = item
        md5 = hashlib.md5(data).digest()
        etag = there.get(number)
        if etag != md5.hex():
            part = {"partNumber": str(number), "uploadId": upload_id}
            etag = _put(client, bucket, key, data, md5, {**part})
        return Sent(len(data), md5, etag)

    sent = []
    for part in in_order(send, parts()):
        advance(part.size)
        sent.append(part)
    return digest.hexdigest(), sent


@retried
def _begin(client: Minio, bucket: str, key: str, size: int) -> str:
    headers: dict[str, str | list[str] | tuple[str]] = {PART_BYTES_HEADER: str(part_size(size))}
    return client._create_multipart_upload(bucket, key, headers)


@retried
def _broken_off(client: Minio, bucket: str, key: str) -> tuple[str, dict[int, str]] | None:
    """The newest upload of the object that has not ended, and the ETags of its parts by number."""
    try:
        uploads = client._list_multipart_uploads(bucket, prefix=key).uploads
        mine = [u for u in uploads if u.object_name == key and u.upload_id]
        if not mine:
            return None
        newest = max(mine, key=lambda u: (u.initiated_time is not None, u.initiated_time))
        assert newest.upload_id is not None
        parts: dict[int, str] = {}
        marker: str | None = None
        while True:
            page = client._list_parts(bucket, key, newest.upload_id, part_number_marker=marker)
            parts |= {part.part_number: part.etag for part in page.parts}
            if not page.is_truncated:
                return newest.upload_id, parts
            marker = str(page.next_part_number_marker)
    except MinioException as error:
        if status(error) in {"NoSuchUpload", "NotImplemented", "MethodNotAllowed", "404"}:
            return None  # it has ended by now, or the store lists none
        raise


@retried
def _complete(bucket: str, key: str, upload_id: str, sent: list[Sent]) -> None:
    client = s3_client(COMPLETE_SECONDS)
    parts = [Part(number, part.etag) for number, part in enumerate(sent, 1)]
    answer = client._complete_multipart_upload(bucket, key, upload_id, parts)
    if not answer.etag:  # a failure after the store had begun to answer 200
        raise Damaged("the store did not put the parts together")
    etag = Etag(in_parts=True)
    for part in sent:
        etag.add(part.md5)
    are_md5s = all(part.etag == part.md5.hex() for part in sent)
    if are_md5s and says_other(answer.etag, etag.text(), answer.http_headers):
        raise Damaged(f"the store holds {answer.etag}, sent was {etag.text()}")
