"""Answers that HTTP and S3 allow and few stores give: each leads to the bytes, or to one line with
the cause and the cure, and leaves nothing behind."""

import gzip
import hashlib
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from lathe_base.errors import Code
from lathe_base.storage import exists, fetch, list_objects, read_text, upload, write_text
from lathe_base.storage.objects import replace_text
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler

TEXT = b"a text of some words, " * 9
PACKED = gzip.compress(TEXT)
Answer = tuple[int, bytes, dict[str, str]]
Double = Callable[["Handler"], Answer | None]
"""Answers a request, or leaves it to the well-behaved store."""


class Handler(QuietHandler):
    """A store of one bucket, which answers as `double` says where that has something to say."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    double: Double
    asked: list[str]

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, self.query = self.path.partition("?")
        self.key = path.removeprefix("/bucket").removeprefix("/")
        self.asked.append(f"{self.command} {self.path}")
        status, body, headers = type(self).double(self) or self.well_behaved()
        headers = {"Last-Modified": formatdate(usegmt=True), **headers}
        if status == NO_LENGTH:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            return
        self.reply(body, status, headers)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def well_behaved(self) -> Answer:
        if self.command == "PUT":
            self.objects[self.key] = self.body
            return 200, b"", {"ETag": etag(self.body)}
        if self.command in ("POST", "DELETE"):
            return 204, b"", {}
        if not self.key:
            return 200, listing(self.objects), XML
        if self.key not in self.objects:
            return failure(404, "NoSuchKey")
        return self.content(self.objects[self.key])

    def content(self, data: bytes, status: int = 0, **headers: str) -> Answer:
        headers = {"ETag": etag(data)} | {k.replace("_", "-"): v for k, v in headers.items()}
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return failure(412, "PreconditionFailed")
        bounds = self.headers.get("Range", "").removeprefix("bytes=")
        if bounds and not status:
            first, last = map(int, bounds.split("-"))
            return 206, data[first : last + 1], headers
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(data))
        return status or 200, data, headers


NO_LENGTH = 299
"""Status 200, without the length that `reply` adds."""
XML = {"Content-Type": "application/xml"}


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def failure(status: int, code: str, **headers: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>Use the endpoint s3.x.example</Message></Error>"
    return status, body.encode(), XML | headers


def listing(objects: dict[str, bytes], more: str = "false", token: str = "") -> bytes:
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-25T12:00:00.000Z</LastModified>"
        f"<ETag>{escape(etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
        for key, data in sorted(objects.items())
    )
    text = f"<ListBucketResult><Name>b</Name><IsTruncated>{more}</IsTruncated>{token}{rows}"
    return f"{text}</ListBucketResult>".encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    handler = type("Store", (Handler,), {"objects": {}, "double": lambda _: None, "asked": []})
    with LoopbackServer(handler) as server:
        for name in ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_PROFILE", "LATHE_S3_SECRET_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("LATHE_NETWORK_PATIENCE", "0")
        yield handler


def a_weak_etag(request: Handler) -> Answer | None:
    if request.command in ("GET", "HEAD") and request.key in request.objects:
        data = request.objects[request.key]
        return request.content(data, ETag=f"W/{etag(data)}")
    return None


def a_weak_etag_that_matches_nothing(request: Handler) -> Answer | None:
    if request.headers.get("If-Match"):
        return failure(412, "PreconditionFailed")
    return a_weak_etag(request)


def an_encoded_object(request: Handler) -> Answer | None:
    if request.command in ("GET", "HEAD") and request.key in request.objects:
        return request.content(request.objects[request.key], Content_Encoding="gzip")
    return None


def no_etag_for_a_put(request: Handler) -> Answer | None:
    if request.command == "PUT":
        return 200, b"", request.well_behaved()[2] | {"ETag": ""}
    return None


READS: dict[str, tuple[Double, bytes]] = {
    "a weak ETag": (a_weak_etag, TEXT),
    "a weak ETag that matches nothing": (a_weak_etag_that_matches_nothing, TEXT),
    "Content-Encoding on the object": (an_encoded_object, PACKED),
    "no ETag for a PUT": (no_etag_for_a_put, TEXT),
}


@pytest.mark.parametrize("name", READS)
def test_these_answers_lead_to_the_bytes(store: type[Handler], tmp_path: Path, name: str) -> None:
    store.double, data = READS[name]
    (tmp_path / "f").write_bytes(data)
    upload(tmp_path / "f", "s3://bucket/f")
    assert store.objects == {"f": data}
    assert fetch("s3://bucket/f", tmp_path / "out").read_bytes() == data
    upload(tmp_path / "f", "s3://bucket/f")  # the digest in the ETag shows that it is there
    assert len([line for line in store.asked if line.startswith("PUT")]) == 1
    write_text("s3://bucket/pointer", "one")
    replace_text("s3://bucket/pointer", "two", "one")
    assert read_text("s3://bucket/pointer") == "two"


def without_length(request: Handler) -> Answer | None:
    if request.command == "HEAD":
        return NO_LENGTH, b"", {"ETag": '"e"'}
    return None


def redirected(request: Handler) -> Answer:
    return failure(307, "TemporaryRedirect", Location="http://127.0.0.1:9/bucket/f")


def of_another_region(request: Handler) -> Answer:
    return failure(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"})


def whole_object(request: Handler) -> Answer | None:
    if request.command == "GET" and request.headers.get("Range"):
        return request.content(TEXT * 100_000, 200)
    return None


def without_end(request: Handler) -> Answer | None:
    return None if request.key else (200, listing(request.objects, "true"), XML)


def always_the_same_page(request: Handler) -> Answer | None:
    token = "<NextContinuationToken>t</NextContinuationToken>"
    return None if request.key else (200, listing(request.objects, "true", token), XML)


FAILURES: dict[str, tuple[Double, Code, str, str]] = {
    "307 to another endpoint": (
        redirected,
        Code.BAD_PATH,
        "TemporaryRedirect",
        "AWS_ENDPOINT_URL and AWS_REGION",
    ),
    "301": (of_another_region, Code.BAD_PATH, "PermanentRedirect", "AWS_ENDPOINT_URL"),
    "a HEAD without a length": (
        without_length,
        Code.SERVER_ERROR,
        "Content-Length",
        "is the address of an",
    ),
    "a listing without a next page": (
        without_end,
        Code.SERVER_ERROR,
        "IsTruncated",
        "is the address of an",
    ),
    "a listing of the same page": (
        always_the_same_page,
        Code.SERVER_ERROR,
        "IsTruncated",
        "update the store",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_these_answers_end_with_one_line(store: type[Handler], tmp_path: Path, name: str) -> None:
    store.objects.update({"p/f": TEXT, "f": TEXT})
    store.double, code, cause, cure = FAILURES[name]
    verbs: list[Callable[[], object]] = [lambda: fetch("s3://bucket/f", tmp_path / "out")]
    if "listing" in name:
        verbs = [lambda: list_objects("s3://bucket/p/"), lambda: fetch("s3://bucket/p/", tmp_path)]
    for verb in verbs:
        with raises(code, cause) as raised:
            verb()
        assert cure in raised.value.hint
        assert "\n" not in raised.value.line and len(store.asked) < 20
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_store_that_ignores_ranges(store: type[Handler], tmp_path: Path) -> None:
    store.objects["f"] = TEXT * 100_000
    store.double = whole_object
    with raises(Code.SERVER_ERROR, "Range"):
        fetch("s3://bucket/f", tmp_path / "out")
    assert not (tmp_path / "out" / "f").exists()


def test_a_conditional_put_answered_with_304(store: type[Handler]) -> None:
    """Some stores say "not modified" in place of "precondition failed"."""

    def refuses(request: Handler) -> Answer | None:
        conditional = {"If-Match", "If-None-Match"} & set(request.headers)
        return (304, b"", {}) if request.command == "PUT" and conditional else None

    store.double = refuses
    with raises(Code.CHANGED, "s3://bucket/pointer"):
        replace_text("s3://bucket/pointer", "two", None)
    assert not exists("s3://bucket/pointer")
