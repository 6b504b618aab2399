"""Error messages of failed transfers: one error with a hint."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lathe_base.errors import Code, UserError
from lathe_base.ports import free_port
from lathe_base.storage import exists, fetch, read_text, remove, sha256, upload, write_text
from lathe_base.storage.objects import Entry, to_json
from tests.support.errors import raises
from tests.support.s3 import ACCESS_KEY, SECRET_KEY
from tests.support.silent import always_sends, http, server


@pytest.mark.parametrize("where", ["nothing", "nothing/"])
def test_nothing_there(store: str, tmp_path: Path, where: str) -> None:
    with raises(Code.NOT_FOUND, f"{store}/{where}: "):
        fetch(f"{store}/{where}", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("s3")
def test_no_bucket(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for key in ("f", "f/"):
        with raises(Code.NOT_FOUND, f"s3://nobucket/{key}"):
            fetch(f"s3://nobucket/{key}", tmp_path / "new")
    for path in (tmp_path, tmp_path / "f"):
        with raises(Code.NOT_FOUND, "NoSuchBucket") as raised:
            upload(path, "s3://nobucket/f")
        assert "create the bucket" in raised.value.hint


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("key", ["a.txt", "novels/"])
def test_wrong_credentials(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    write_text(f"{s3}/a.txt", "A")
    monkeypatch.setenv(name, "wrong")
    with raises(Code.UNAUTHORIZED, key) as raised:
        fetch(f"{s3}/{key}", tmp_path)
    assert name in raised.value.hint and "\n" not in raised.value.what


def test_without_a_server_or_with_a_bad_address(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    started = time.monotonic()
    with raises(Code.UNREACHABLE, address):
        fetch(f"{s3}/a.txt", tmp_path)
    assert time.monotonic() - started < 30
    with raises(Code.BAD_PATH, "s3://corpora", "s3://bucket/key"):
        fetch("s3://corpora", tmp_path)
    with raises(Code.BAD_PATH, "s3://No_Bucket!/x"):
        fetch("s3://No_Bucket!/x", tmp_path)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with raises(Code.MISSING_OPTION, "AWS_SECRET_ACCESS_KEY"):
        fetch(f"{s3}/a.txt", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with raises(Code.BAD_PATH, "AWS_ENDPOINT_URL=127.0.0.1:9000"):
        fetch(f"{s3}/a.txt", tmp_path)


def test_a_secret_is_in_no_message(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "wJalrXUtnFEMI/K7MDENG"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    caplog.set_level(0)
    endpoints = (
        os.environ["AWS_ENDPOINT_URL"],
        f"http://127.0.0.1:{free_port()}",
        f"http://user:{secret}@127.0.0.1:{free_port()}",
        f"ftp://user:{secret}@host",
    )
    said = []
    for endpoint in endpoints:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for key in ("a", "p/"):
            with pytest.raises(UserError) as raised:
                fetch(f"{s3}/{key}", tmp_path)
            error: BaseException | None = raised.value
            while error:
                said += [str(error), repr(error)]
                error = error.__cause__
    with pytest.raises(UserError) as raised:
        fetch(f"http://user:{secret}@127.0.0.1:{free_port()}/f", tmp_path)
    said.append(str(raised.value))
    with pytest.raises(UserError) as raised:
        fetch(f"http://127.0.0.1:{free_port()}/f?X-Amz-Signature={secret}", tmp_path)
    said.append(str(raised.value))
    for part in secret.split("/"):
        assert part not in "\n".join([*said, caplog.text])


@pytest.mark.parametrize("verb", ["upload", "write", "upload folder"])
def test_a_store_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """One error, without the store's XML."""
    body = b"<Error><Code>AccessDenied</Code><Message>read only</Message></Error>"
    answer = http("403 Forbidden", body, "Content-Type: application/xml")
    (tmp_path / "f").write_text("x")
    with server(always_sends(answer)) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with raises(Code.FORBIDDEN, "AccessDenied") as raised:
            if verb == "write":
                write_text("s3://bucket/key", "x")
            else:
                upload(tmp_path if "folder" in verb else tmp_path / "f", "s3://bucket/key")
    assert "AWS_ACCESS_KEY_ID" in raised.value.hint


REASONS = {
    "AuthorizationHeaderMalformed": (Code.INVALID_VALUE, "expecting 'eu-west-1'", "AWS_REGION"),
    "ExpiredToken": (Code.UNAUTHORIZED, "the token has expired", "AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": (Code.UNAUTHORIZED, "the difference is too large", "clock"),
    "PermanentRedirect": (Code.BAD_PATH, "use the endpoint of the bucket", "AWS_ENDPOINT_URL"),
    "QuotaExceeded": (Code.SERVER_ERROR, "the bucket is full", "the store's log"),
    "AccessDenied": (Code.FORBIDDEN, "", "s3:ListBucket"),
}


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden", "301 Moved Permanently"])
@pytest.mark.parametrize("code", REASONS)
def test_the_reason_for_a_failed_head_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: str
) -> None:
    meaning, said, cure = REASONS[code]
    xml = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()

    def answer(connection: socket.socket, stop: threading.Event) -> None:
        body = b"" if connection.recv(1 << 16).startswith(b"HEAD") else xml
        connection.sendall(http(status, body, "Content-Type: application/xml"))

    with server(answer) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        with raises(meaning, said) as raised:
            fetch("s3://bucket/key", tmp_path)
    assert cure in raised.value.hint and code in raised.value.what


@pytest.mark.parametrize("refusal", ["501 Not Implemented", "405 Method Not Allowed"])
def test_a_store_that_deletes_one_object_at_a_time(
    s3: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """The store rejects `POST ?delete`; all other requests are forwarded to a real store."""

    def answer(connection: socket.socket, stop: threading.Event) -> None:
        head = connection.recv(1 << 16)
        if head.startswith(b"POST") and b"delete" in head.split(b"\r\n")[0]:
            connection.sendall(http(refusal, b""))
            return
        with socket.create_connection(s3_server.removeprefix("http://").split(":")) as store:
            fields, _, body = head.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", fields, re.I)
            while length and len(body) < int(length[1]):
                body += connection.recv(1 << 16)
            store.sendall(fields + b"\r\nConnection: close\r\n\r\n" + body)
            while data := store.recv(1 << 16):
                connection.sendall(data)

    (tmp_path / "a").write_text("A", encoding="utf-8")
    (tmp_path / "b").write_text("B", encoding="utf-8")
    with server(answer) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        upload(tmp_path, f"{s3}/p")
        (tmp_path / "b").unlink()
        upload(tmp_path, f"{s3}/p")
        assert exists(f"{s3}/p/a") and not exists(f"{s3}/p/b")
        remove(f"{s3}/p")
        assert not exists(f"{s3}/p/a")


def test_a_mounted_secret(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(f"{s3}/a.txt", "A")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of another store")
    monkeypatch.setenv("LATHE_S3_SECRET_DIR", str(tmp_path))
    with raises(Code.UNAUTHORIZED, "accesskey and secretkey"):
        read_text(f"{s3}/a.txt")
    (tmp_path / "accesskey").write_text(f"{ACCESS_KEY}\n")
    (tmp_path / "secretkey").write_text(SECRET_KEY)
    assert read_text(f"{s3}/a.txt") == "A"
    (tmp_path / "secretkey").write_text("wrong")
    with raises(Code.UNAUTHORIZED, "a.txt") as raised:
        read_text(f"{s3}/a.txt")
    assert str(tmp_path) in raised.value.hint


def test_a_damaged_prefix(store: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("aa")
    (source / "b").write_text("bb")
    for spoil, error, message in (
        (lambda: remove(f"{store}/p/b"), Code.CORRUPT, "b is absent"),
        (lambda: write_text(f"{store}/p/b", "bbb"), Code.CORRUPT, "b is 3 bytes"),
        (lambda: write_text(f"{store}/p/b", "xx"), Code.CORRUPT, "p/b: corrupt: its SHA-256"),
        (lambda: write_text(f"{store}/p/.lathe.json", "{"), Code.MALFORMED, ".lathe.json"),
        (
            lambda: write_text(
                f"{store}/p/.lathe.json", to_json({"../evil": Entry(2, sha256(source / "a"))})
            ),
            Code.UNSAFE,
            "'../evil'",
        ),
    ):
        upload(source, f"{store}/p")
        spoil()
        with raises(error, message) as raised:
            fetch(f"{store}/p/", tmp_path / "out")
        assert raised.value.hint
        assert set(os.listdir(tmp_path / "out")) <= {".lathe.partial"}
    upload(source, f"{store}/p")
    assert (fetch(f"{store}/p/", tmp_path / "out") / "b").read_text() == "bb"
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]


@pytest.mark.parametrize("key", ["../x", "a/../../x", "a//b"])
@pytest.mark.parametrize("store", ["s3://bucket", "file:///folder"])
def test_a_key_that_leaves_its_prefix(tmp_path: Path, store: str, key: str) -> None:
    for call in (lambda uri: fetch(uri, tmp_path), exists, remove, lambda u: upload(tmp_path, u)):
        with raises(Code.UNSAFE, "'..'"):
            call(f"{store}/{key}")


def test_a_disk_too_small(store: str, tmp_path: Path) -> None:
    """A tmpfs of 4 MB that is too small, then one that is filled by another process meanwhile."""
    (tmp_path / "f").write_bytes(os.urandom(6_000_000))
    upload(tmp_path / "f", f"{store}/f")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        with raises(Code.NO_SPACE, "0.006 GB", "small has 0.00"):
            fetch(f"{store}/f", small)
        assert os.listdir(small) == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
            with raises(Code.NO_SPACE, small) as raised:
                fetch(f"{store}/f", small)
        assert "free some space" in raised.value.hint
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_limit_on_file_sizes(store: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(6_000_000))
    upload(tmp_path / "f", f"{store}/f")
    fetch = f"{sys.executable} -m lathe_base.storage fetch {store}/f {tmp_path}/out"
    command = f"ulimit -f 2000; exec {fetch}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 2
    first, second = ended.stderr.splitlines()
    assert first.startswith("error[no-space]: ") and "hint: free some space" in second


def test_a_damaged_download(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes corrupted in transfer are detected by the object's ETag."""
    (tmp_path / "f").write_bytes(os.urandom(1000))
    upload(tmp_path / "f", f"{s3}/f")
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, at: write(file, bytes(len(data)), at) or len(data)
    )
    with raises(Code.CORRUPT, "ETag"):
        fetch(f"{s3}/f", tmp_path / "out")
