"""A fake in-memory S3 server, with the features that `rclone serve s3` lacks: versioning, object
lock and conditional PUT. It does not verify signatures.

Deleting an object of a versioned bucket adds a delete marker; a locked version cannot be deleted.
With object lock, a PUT without Content-MD5 is rejected, also over plain HTTP.
"""

import base64
import hashlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.loopback import LoopbackServer, QuietHandler

DATE = "2026-11-25T12:00:00.000Z"
HTTP_DATE = "Wed, 25 Nov 2026 12:00:00 GMT"
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
Reply = tuple[int, bytes, dict[str, str]]
"""Status, body, and headers."""


@dataclass
class Version:
    """A version of an object; `data` of None makes it a delete marker."""

    id: str
    data: bytes | None
    etag: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class FakeS3:
    """Context manager that serves one bucket, under any name, at `url`.

    Attributes:
        versions: versions of every key, newest last; at most one without versioning.
        before: hook called with the method and key before each request is processed.
        requests: method, path and query of every request.
        tokens: session tokens of the requests.
    """

    def __init__(self, versioning: bool = False, lock: bool = False) -> None:
        self.versioning, self.lock = versioning or lock, lock
        self.versions: dict[str, list[Version]] = {}
        self.before: Callable[[str, str], None] = lambda method, key: None
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self._uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = {}
        self._numbers, self._mutex = itertools.count(1), threading.RLock()

    def __enter__(self) -> "FakeS3":
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = LoopbackServer(handler).__enter__()
        self.url = self._http.url
        return self

    def __exit__(self, *_: object) -> None:
        self._http.__exit__()

    def current(self, key: str) -> Version | None:
        """Version that a GET returns."""
        newest = self.versions.get(key, [])[-1:]
        return newest[0] if newest and newest[0].data is not None else None

    def visible(self) -> list[str]:
        """Keys that a listing returns."""
        return sorted(key for key in self.versions if self.current(key))

    def store(self, key: str, data: bytes | None, etag: str, headers: dict[str, str]) -> Version:
        version = Version(str(next(self._numbers)), data, etag, headers)
        kept = self.versions.get(key, []) if self.versioning else []
        self.versions[key] = [*kept, version]
        return version

    def delete(self, key: str, version: str) -> None:
        """Add a delete marker in a versioned bucket; given a version, delete it for good."""
        if version and self.lock:
            raise Refused(403, "AccessDenied")
        if version:
            self.versions[key] = [one for one in self.versions[key] if one.id != version]
        elif self.versioning:
            self.store(key, None, "", {})
        else:
            self.versions.pop(key, None)


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeS3

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        self.fake.requests.append(f"{self.command} {self.path}")
        self.fake.tokens.add(self.headers.get("X-Amz-Security-Token"))
        self.fake.before(self.command, key)
        try:
            with self.fake._mutex:
                answer = getattr(self, f"_{self.command.lower()}")(key, query, body)
        except Refused as refused:
            error = f"<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>"
            answer = (refused.status, error.encode(), {"Content-Type": "application/xml"})
        status, data, headers = answer
        self.reply(data, status, {"Last-Modified": HTTP_DATE, **headers})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _get(self, key: str, query: dict[str, str], _: bytes) -> Reply:
        if not key and "uploads" in query:
            return _xml("ListMultipartUploadsResult", self._list_uploads(query.get("prefix", "")))
        if not key:
            return _xml("ListBucketResult", self._list(query.get("prefix", "")))
        if "uploadId" in query:
            return _xml("ListPartsResult", self._list_parts(query["uploadId"]))
        found = self.fake.current(key)
        if not found:
            raise Refused(404, "NoSuchKey")
        if (wanted := self.headers.get("If-Match", "").strip('"')) and wanted != found.etag:
            raise Refused(412, "PreconditionFailed")
        data, status, headers = found.data or b"", 200, {"ETag": f'"{found.etag}"'}
        if bounds := self.headers.get("Range"):
            first, last = bounds.removeprefix("bytes=").split("-", 1)
            whole, status = len(data), 206
            data = data[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{whole}"
        headers["Content-Length"] = str(len(data))
        return status, data, headers | found.headers

    _head = _get

    def _put(self, key: str, query: dict[str, str], body: bytes) -> Reply:
        md5 = hashlib.md5(body)
        sent = self.headers.get("Content-MD5")
        if sent and base64.b64decode(sent) != md5.digest():
            raise Refused(400, "BadDigest")
        if self.fake.lock and not sent:
            raise Refused(400, "InvalidRequest")
        if "uploadId" in query:
            if query["uploadId"] not in self.fake._uploads:
                raise Refused(404, "NoSuchUpload")
            self.fake._uploads[query["uploadId"]][2][int(query["partNumber"])] = body
            return 200, b"", {"ETag": f'"{md5.hexdigest()}"'}
        found = self.fake.current(key)
        wanted = self.headers.get("If-Match", "").strip('"')
        if (wanted and (not found or found.etag != wanted)) or (
            found and self.headers.get("If-None-Match") == "*"
        ):
            raise Refused(412, "PreconditionFailed")
        return self._stored(key, body, md5.hexdigest(), self._own_headers())

    def _post(self, key: str, query: dict[str, str], body: bytes) -> Reply:
        if "delete" in query:
            if not self.headers.get("Content-MD5"):
                raise Refused(400, "MissingContentMD5")
            names = [
                _text(one, "Key")
                for one in ElementTree.fromstring(body)
                if one.tag.endswith("Object")
            ]
            for name in names:
                self.fake.delete(name, "")
            return _xml("DeleteResult", "")
        if "uploads" in query:
            number = str(next(self.fake._numbers))
            self.fake._uploads[number] = (key, self._own_headers(), {})
            return _xml(
                "InitiateMultipartUploadResult",
                f"<Key>{escape(key)}</Key><UploadId>{number}</UploadId>",
            )
        if query["uploadId"] not in self.fake._uploads:
            raise Refused(404, "NoSuchUpload")
        _, headers, parts = self.fake._uploads.pop(query["uploadId"])
        data = b"".join(parts[number] for number in sorted(parts))
        digests = b"".join(hashlib.md5(parts[number]).digest() for number in sorted(parts))
        etag = f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"
        self._stored(key, data, etag, headers)
        return _xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>{etag}</ETag>")

    def _delete(self, key: str, query: dict[str, str], _: bytes) -> Reply:
        if "uploadId" in query:
            self.fake._uploads.pop(query["uploadId"], None)
        else:
            self.fake.delete(key, query.get("versionId", ""))
        return 204, b"", {}

    def _stored(self, key: str, data: bytes, etag: str, headers: dict[str, str]) -> Reply:
        made = self.fake.store(key, data, etag, headers)
        version = {"x-amz-version-id": made.id} if self.fake.versioning else {}
        return 200, b"", {"ETag": f'"{etag}"'} | version

    def _own_headers(self) -> dict[str, str]:
        return {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")}

    def _list(self, prefix: str) -> str:
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{DATE}</LastModified>"
            f"<ETag>{found.etag}</ETag><Size>{len(found.data or b'')}</Size></Contents>"
            for key in self.fake.visible()
            if key.startswith(prefix) and (found := self.fake.current(key))
        ]
        return f"<Name>b</Name><IsTruncated>false</IsTruncated>{''.join(rows)}"

    def _list_uploads(self, prefix: str) -> str:
        rows = [
            f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            f"<Initiated>{DATE}</Initiated></Upload>"
            for number, (key, _, _) in self.fake._uploads.items()
            if key.startswith(prefix)
        ]
        return f"<Bucket>b</Bucket><IsTruncated>false</IsTruncated>{''.join(rows)}"

    def _list_parts(self, number: str) -> str:
        rows = [
            f"<Part><PartNumber>{n}</PartNumber><LastModified>{DATE}</LastModified>"
            f"<ETag>{hashlib.md5(data).hexdigest()}</ETag><Size>{len(data)}</Size></Part>"
            for n, data in sorted(self.fake._uploads[number][2].items())
        ]
        return f"<IsTruncated>false</IsTruncated>{''.join(rows)}"


def _xml(name: str, inside: str) -> Reply:
    text = f'<?xml version="1.0"?><{name} xmlns="{NAMESPACE}">{inside}</{name}>'
    return 200, text.encode(), {"Content-Type": "application/xml"}


def _text(element: ElementTree.Element, name: str) -> str:
    return next(part.text or "" for part in element if part.tag.rpartition("}")[2] == name)
