"""An S3 store, through the minio client; `s3://bucket/key` or `minio://`.

Uploads call private methods of the client, only in this file, so pyproject.toml excludes its next
minor version. The public `put_object` takes neither `Content-MD5` nor `If-Match`, uploads parts
without a retry for each, aborts the upload after an error, so that nothing is left to resume, and
does not return the parts' ETags. Nor are there public methods that list unfinished uploads and
their parts. The public `list_objects` asks for ever if a store names no next page.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import urllib3
from minio import Minio
from minio.datatypes import Object, Part, parse_list_objects
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from lathe_base.errors import Code, UserError
from lathe_base.storage.credentials import explain_credentials, provider
from lathe_base.storage.failures import CHANGED, MISSING, Damaged, StoreError, retried, shown
from lathe_base.storage.files import require_relative
from lathe_base.storage.http import is_address
from lathe_base.storage.network import pool
from lathe_base.storage.object_store import BINARY, Body, Sent, Stored, UploadEnded
from lathe_base.storage.parts import CONNECTIONS, Etag, is_md5, part_size, same_content

SCHEMES = ("s3", "minio")
ENDPOINT = "AWS_ENDPOINT_URL"
STYLE = "AWS_S3_ADDRESSING_STYLE"
DEFAULT_REGION = "us-east-1"
# Stored with a multipart object: without the part size its ETag cannot be checked.
PART_BYTES_HEADER = "x-amz-meta-lathe-part-bytes"
READ_BYTES = 1 << 20
COMPLETE_SECONDS = 300.0  # a store may copy all parts before it answers
# Errors of a multipart upload that another process has ended or mixed its own parts into.
ENDED = {"404", "NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"}
ENDED |= {"NotImplemented"}  # rclone: a part whose bytes differ from those sent before
# Codes that the client makes up for a HEAD that was refused without saying why.
BEHIND_HEAD = {
    "400",
    "BadRequest",
    "403",
    "AccessDenied",
    "301",
    "307",
    "PermanentRedirect",
    "Redirect",
}
LONG_AGO = datetime.fromtimestamp(0, UTC)


Headers = dict[str, str | list[str] | tuple[str]]


def open_store(uri: str) -> tuple["S3Store", str]:
    """The bucket's store, and the key, of `s3://bucket/key` (or `minio://`).

    Raises:
        UserError: no bucket or key, another scheme, a key with `..`, or the AWS variables are
            wrong.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES or not bucket or not key or "@" in bucket:
        raise UserError(
            f"{shown(uri)}: not an object's address",
            "write s3://bucket/key; credentials come from the AWS variables",
            Code.BAD_PATH,
        )
    require_relative(key.removesuffix("/"), uri)
    return S3Store(scheme, bucket), key


def endpoint() -> SplitResult:
    """The store's address, `http://host:port` or `https://host:port`."""
    uri = os.environ.get(ENDPOINT) or "https://s3.amazonaws.com"
    if is_address(uri):
        address = urlsplit(uri)
        if address.scheme in ("http", "https") and address.path in ("", "/"):
            return address
    raise UserError(
        f"{ENDPOINT}={shown(uri)}: not an address", "write http://host:port", Code.BAD_PATH
    )


def s3_client(read_seconds: float | None = None) -> Minio:
    """A client for the store that the AWS variables, or a mounted secret, describe.

    Args:
        read_seconds: seconds to wait for an answer; LATHE_NETWORK_TIMEOUT by default.

    Raises:
        UserError: an invalid address, or a secret that cannot be read.
    """
    address = endpoint()
    # Without a region, the client asks Amazon for the bucket's. Other stores are not asked, because
    # keys for a part of a bucket may not read its location.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = region or (DEFAULT_REGION if os.environ.get(ENDPOINT) else None)
    client = Minio(
        address.netloc,
        credentials=provider(
            is_amazon=bool(re.search(r"\.amazonaws\.com(\.cn)?$", address.netloc))
        ),
        region=region,
        secure=address.scheme == "https",
        # minio's default pool retries for minutes; here only `retried` does.
        http_client=pool(CONNECTIONS, read_seconds, address.geturl()),
    )
    # The bucket is in the host name or in the path, as boto3's variable says.
    style = os.environ.get(STYLE) or "auto"
    if style == "virtual":
        client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    elif style == "path":
        client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    elif style != "auto":
        raise UserError(
            f"{STYLE}={style}: unknown style", "set it to auto, path or virtual", Code.UNKNOWN_NAME
        )
    return client


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the client's exceptions into StoreError."""
    try:
        yield
    except (MinioException, urllib3.exceptions.HTTPError) as error:
        store = os.environ.get(ENDPOINT) or ""
        # The store's message, without the client's additions.
        message = error.message if isinstance(error, S3Error) and error.message else str(error)
        code = ""
        if isinstance(error, ServerError):
            code = str(error.status_code)
        elif isinstance(error, S3Error):
            code = error.code or ""
        elif isinstance(error, InvalidResponseError):  # valid XML sent as text/xml, as by rclone
            match = re.search(
                r"<Code>(\w+)</Code>|Response code: (\d+), (?!.*<Code>)", str(error), re.S
            )
            code = (match[1] or match[2]) if match else ""
        variable = ENDPOINT if store else ""
        raise StoreError(message, code, store, variable, explain_credentials()) from error


class S3Store:
    """One bucket. See `ObjectStore` for the methods."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self._scheme, self._bucket = scheme, bucket
        self._client = s3_client()

    def address(self, key: str) -> str:
        return f"{self._scheme}://{self._bucket}/{key}"

    def claim(self, key: str) -> None:
        """Nothing to check: any prefix in a bucket may be replaced."""

    @retried
    def stat(self, key: str) -> Stored | None:
        try:
            with _translated():
                listed = self._client.stat_object(self._bucket, key)
        except StoreError as error:
            if error.code in MISSING:
                return None
            if error.code in BEHIND_HEAD:  # a HEAD response has no body: a GET's says why
                with _translated():
                    self._client.get_object(self._bucket, key, length=1).close()
            raise
        if "content-length" not in (listed.metadata or {}):  # the client says 0
            raise self._refused(key, "answers a HEAD without Content-Length")
        return Stored(
            key,
            listed.size or 0,
            self._etag(key, listed.etag),
            listed.last_modified or LONG_AGO,
            (listed.metadata or {}).get(PART_BYTES_HEADER),
        )

    @retried
    @_translated()
    def list_below(self, prefix: str) -> dict[str, Stored]:
        return {
            o.object_name.removeprefix(prefix): Stored(
                o.object_name, o.size or 0, _plain(o.etag), o.last_modified or LONG_AGO
            )
            for o in self._list(prefix)
            if o.object_name and not o.object_name.endswith("/")
        }

    @retried
    @_translated()
    def has_any(self, prefix: str) -> bool:
        return any(True for _ in self._list(prefix))

    def _list(self, prefix: str) -> Iterator[Object]:
        query: Headers = {"list-type": "2", "delimiter": "", "encoding-type": "url"}
        query |= {"max-keys": "1000", "prefix": prefix}
        tokens: set[str | None] = {None}  # a store that repeats one would be asked for ever
        while True:
            page = self._client._execute("GET", self._bucket, query_params=dict(query))
            objects, is_truncated, token, _ = parse_list_objects(page)
            yield from objects
            if not is_truncated:
                return
            if token in tokens:
                raise self._refused(prefix, "lists without end: IsTruncated without another page")
            assert token is not None
            tokens.add(token)
            query["continuation-token"] = token

    @retried
    @_translated()
    def get(self, key: str) -> bytes:
        response = self._client.get_object(self._bucket, key)
        try:
            self._etag(key, response.headers.get("etag"))
            return bytes(response.read(decode_content=False))  # the object's own Content-Encoding
        finally:
            response.close()
            response.release_conn()

    @contextmanager
    def open_range(self, stored: Stored, start: int, length: int) -> Iterator[Body]:
        condition: Headers = {"If-Match": f'"{stored.etag}"'}
        where = (self._bucket, stored.key, start, length)
        try:
            with _translated():
                response = self._client.get_object(*where, condition)
        except StoreError as error:
            if error.code not in CHANGED or (self.stat(stored.key) or stored).etag != stored.etag:
                raise
            # A weak ETag never matches (RFC 9110); it is compared below.
            with _translated():
                response = self._client.get_object(*where)
        try:
            if _plain(response.headers.get("etag")) != stored.etag:
                raise StoreError("the store ignores If-Match", "PreconditionFailed")
            sent = response.headers.get("content-length")  # rclone's status is 200 in any case
            if length < stored.size and sent == str(stored.size):
                raise self._refused(stored.key, "ignores Range, and answers with the whole object")
            with _translated():
                is_digest = not _is_encrypted(response.headers)
                yield Body(response.stream(READ_BYTES, decode_content=False), is_digest)
        finally:
            response.close()
            response.release_conn()

    def same_content(self, stored: Stored, path: Path) -> str | None:
        return same_content(path, stored.etag)

    def put(
        self, key: str, data: bytes, content_type: str = BINARY, if_match: str | None = None
    ) -> None:
        headers: Headers = {"Content-Type": content_type}
        md5 = hashlib.md5(data).digest()
        if if_match is None:
            self._put(key, data, md5, headers)
            return
        condition = {"If-Match": f'"{if_match}"'} if if_match else {"If-None-Match": "*"}
        try:
            self._put(key, data, md5, headers | condition)
        except StoreError as error:
            if error.code == "304":
                raise StoreError(str(error), "PreconditionFailed") from error
            ignored = error.code in {"501", "NotImplemented"}
            if if_match and error.code in CHANGED:  # a weak ETag never matches
                stored = self.stat(key)
                ignored = stored is not None and stored.etag == if_match
            if not ignored:
                raise
            self._put(key, data, md5, headers)  # no conditional puts: the caller has checked

    @retried
    def _put(
        self,
        key: str,
        data: bytes,
        md5: bytes,
        headers: Headers,
        part: Headers | None = None,
    ) -> str:
        """Put an object, or with `part` one part of it, and return the store's ETag."""
        # The store refuses a body with another MD5: damage on the way is not kept.
        headers = headers | {"Content-MD5": base64.b64encode(md5).decode()}
        # The public put_object aborts an interrupted upload; this request leaves it to be resumed.
        with _translated():
            answer = self._client._put_object(self._bucket, key, data, headers, part)
        if not answer.etag and part is None:  # it is stored: a HEAD tells its ETag
            stored = self.stat(key)
            if stored is None or stored.size != len(data):
                raise Damaged("the store has not kept the object that it accepted")
            return stored.etag
        etag = self._etag(key, answer.etag)
        _check_etag(etag, md5.hex(), answer.http_headers)
        return etag

    def _etag(self, key: str, etag: str | None) -> str:
        """The ETag, which every S3 store sends with an object, but other servers may not."""
        if not etag:
            raise self._refused(key, "answers without an ETag")
        return _plain(etag)

    def _refused(self, key: str, does: str) -> UserError:
        return UserError(
            f"{self.address(key)}: {shown(endpoint().geturl())} {does}",
            f"check that {ENDPOINT} is the address of an S3 store, and update the store",
            Code.SERVER_ERROR,
        )

    @contextmanager
    def multipart(self, key: str, size: int, resume: bool) -> Iterator["S3Multipart"]:
        interrupted = self._interrupted_upload(key) if resume else None
        upload_id, there = interrupted or (self._begin(key, size), {})
        yield S3Multipart(self, key, upload_id, there)

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        try:
            self._delete_together(names)
        except StoreError as error:
            if error.code not in {"405", "501", "MethodNotAllowed", "NotImplemented"}:
                raise
            for name in names:  # a store without DeleteObjects
                self._delete_one(name)

    @retried
    @_translated()
    def _delete_together(self, names: list[str]) -> None:
        objects = [DeleteObject(name) for name in names]
        for error in self._client.remove_objects(self._bucket, objects):
            raise UserError(
                f"{self.address(error.name or '')}: cannot be deleted ({error.code})",
                "check the permissions of the access key",
                Code.FORBIDDEN,
            )

    @retried
    @_translated()
    def _delete_one(self, name: str) -> None:
        self._client.remove_object(self._bucket, name)

    @retried
    @_translated()
    def _begin(self, key: str, size: int) -> str:
        headers: Headers = {PART_BYTES_HEADER: str(part_size(size))}
        return self._client._create_multipart_upload(self._bucket, key, headers)

    @retried
    def _interrupted_upload(self, key: str) -> tuple[str, dict[int, str]] | None:
        """Id of the newest unfinished upload of the object, and its parts' ETags by number."""
        try:
            with _translated():
                uploads = self._client._list_multipart_uploads(self._bucket, prefix=key).uploads
                unfinished = [u for u in uploads if u.object_name == key and u.upload_id]
                if not unfinished:
                    return None
                # An upload without a time compares as the oldest.
                newest = max(
                    unfinished, key=lambda u: (u.initiated_time is not None, u.initiated_time)
                )
                assert newest.upload_id is not None
                parts: dict[int, str] = {}
                marker: str | None = None
                while True:
                    page = self._client._list_parts(
                        self._bucket, key, newest.upload_id, part_number_marker=marker
                    )
                    parts |= {part.part_number: part.etag for part in page.parts}
                    if not page.is_truncated:
                        return newest.upload_id, parts
                    if int(page.next_part_number_marker or 0) <= int(marker or 0):
                        return None  # the list has no end: upload all parts again
                    marker = str(page.next_part_number_marker)
        except StoreError as error:
            if error.code in {"NoSuchUpload", "NotImplemented", "MethodNotAllowed", "404"}:
                return None  # it has ended by now, or the store does not list uploads
            raise

    @retried
    def _complete(self, key: str, upload_id: str, sent: list[Sent]) -> None:
        client = s3_client(COMPLETE_SECONDS)
        parts = [Part(number, part.etag) for number, part in enumerate(sent, 1)]
        with _translated():
            answer = client._complete_multipart_upload(self._bucket, key, upload_id, parts)
        if not answer.etag:  # the store failed after it had begun to answer 200
            raise Damaged("the store failed to join the parts")
        # Where each part's ETag is its MD5, that of the object has to be the digest of these.
        etag = Etag(in_parts=True)
        for part in sent:
            etag.add(part.md5)
        if all(part.etag == part.md5.hex() for part in sent):
            _check_etag(_plain(answer.etag), etag.text(), answer.http_headers)


class S3Multipart:
    """See `Multipart`."""

    def __init__(self, store: S3Store, key: str, upload_id: str, there: dict[int, str]) -> None:
        self._store, self._key, self._id, self.there = store, key, upload_id, there

    def put(self, number: int, data: bytes, md5: bytes) -> str:
        part: Headers = {"partNumber": str(number), "uploadId": self._id}
        with _ended():
            return self._store._put(self._key, data, md5, {}, part)

    def complete(self, sent: list[Sent]) -> None:
        with _ended():
            self._store._complete(self._key, self._id, sent)


@contextmanager
def _ended() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if error.code in ENDED:
            raise UploadEnded from error
        raise


def _plain(etag: str | None) -> str:
    """An ETag without quotes and without the mark of a weak one, which a proxy may have added."""
    return (etag or "").removeprefix("W/").strip('"')


def _check_etag(etag: str, expected: str, headers: Mapping[str, str] | None) -> None:
    """Raise Damaged if an object's ETag is the digest of bytes other than those sent."""
    if etag != expected and is_md5(etag) and not _is_encrypted(headers or {}):
        raise Damaged(f"the store has the ETag {etag}, but the bytes sent have {expected}")


def _is_encrypted(headers: Mapping[str, str]) -> bool:
    """Whether it is encrypted with the user's key (SSE-KMS, SSE-C): its ETag is not a digest."""
    return any(
        name.lower().startswith("x-amz-server-side-encryption") and value != "AES256"
        for name, value in headers.items()
    )
