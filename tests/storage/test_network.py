"""Invalid addresses and unresponsive servers: one message, promptly, without secrets."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lathe_base.artifacts.remote import input_path
from lathe_base.errors import Code, UserError
from lathe_base.ports import free_port
from lathe_base.storage import (
    exists,
    fetch,
    is_remote,
    list_uris,
    read_text,
    remove,
    upload,
    write_text,
)
from lathe_base.storage.failures import shown
from lathe_base.storage.network import network_timeout
from tests.support import warm
from tests.support.errors import raises
from tests.support.silent import ANSWERS, always_sends, http, server

WAITS = 0.4
SLOW = ("silent", "trickle", "trickling body")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LATHE_NETWORK_TIMEOUT", str(WAITS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no pauses between attempts
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")


def one_message(call: Callable[[], object], at_most: float) -> UserError:
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        call()
    assert time.monotonic() - started < at_most
    lines = str(raised.value).splitlines()
    assert len(lines) == 2 and len(lines[0]) < 600, lines
    assert "the-secret" not in str(raised.value)
    return raised.value


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_web_server_that_does_not_behave(tmp_path: Path, kind: str) -> None:
    if kind in ("no XML", "other XML"):
        return  # valid responses of a web server
    with server(ANSWERS[kind]) as port:
        address = f"http://127.0.0.1:{port}"
        error = one_message(lambda: fetch(f"{address}/f.txt?token=the-secret", tmp_path), 8)
    assert f"{address}/f.txt: " in error.what
    if kind in SLOW:
        assert error.code is Code.TIMEOUT and "LATHE_NETWORK_TIMEOUT" in error.hint
    assert [p for p in tmp_path.iterdir() if p.name != "cache"] == []


VERBS = ("fetch", "fetch prefix", "exists", "list", "read", "write", "remove", "upload")
WAITED_FOR = [(verb, kind) for verb in ("fetch prefix", "read", "upload") for kind in SLOW]
"""A sample, since all requests wait in the same two places."""


@pytest.mark.parametrize(
    ("verb", "kind"), [*((v, k) for v in VERBS for k in ANSWERS if k not in SLOW), *WAITED_FOR]
)
def test_a_store_that_does_not_behave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verb: str
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    calls: dict[str, Callable[[], object]] = {
        "fetch": lambda: fetch("s3://bucket/key", tmp_path / "out"),
        "fetch prefix": lambda: fetch("s3://bucket/prefix/", tmp_path / "out"),
        "exists": lambda: exists("s3://bucket/key"),
        "list": lambda: list_uris("s3://bucket/prefix/"),
        "read": lambda: read_text("s3://bucket/key"),
        "write": lambda: write_text("s3://bucket/key", "text"),
        "remove": lambda: remove("s3://bucket/key"),
        "upload": lambda: upload(tmp_path / "f", "s3://bucket/key"),
    }
    with server(ANSWERS[kind]) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        if kind == "a page" and verb in ("exists", "remove"):
            return  # "not found" is a valid response
        if kind == "trickling body" and verb == "exists":
            return  # responses to HEAD have no body
        error = one_message(calls[verb], 9)
    assert error.what.startswith("s3://bucket/")
    if kind in SLOW:
        assert error.code is Code.TIMEOUT and f"http://127.0.0.1:{port} in " in error.what
        assert "LATHE_NETWORK_TIMEOUT" in error.hint


def test_a_dead_store_is_one_error_of_the_command_line(tmp_path: Path) -> None:
    """No usage text or escape sequences, and the verb does not start."""
    ended = subprocess.run(
        [*warm.python(), "-m", "lathe", "evaluate", "s3://bucket/model", "--output", "out"],
        cwd=tmp_path,
        env=os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"},
        capture_output=True,
        encoding="utf-8",
    )
    assert ended.returncode == 69 and ended.stdout == ""
    first, hint = ended.stderr.splitlines()
    assert first.startswith("error[unreachable]: s3://bucket/model/: ")
    assert "http://127.0.0.1:" in first
    assert hint == "  hint: check the network and AWS_ENDPOINT_URL"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "uri",
    [
        *("https://[::1", "http://", "https:///path", "http://host:99999/x", "http://host:0/x"),
        *("http://host:port/x", "http://a b/x", "http://host/a b", "http://bücher.example/x"),
        *("http://host/é", "http://host/\nx", "http://user:the-secret@host/x", "http://host/.."),
        *("http://\udce9/x", "s3://", "s3:///x", "s3://b", "s3://b/", "s3:/b/x", "s3:b"),
        *("s3://b/../x", "s3://a b/x", "s3://BÜCHER/x", "s3://key:the-secret@bucket/x"),
        *("s3://[::1", "minio://", "S3://bucket/key", "s3://x" + "y" * 300 + "/key"),
        *("file:", "file://", "file:///", "file://host/x", "file:x", "file:///nowhere/a/../b"),
        *("file:///a//b", "file:///nowhere/" + "y" * 300, "file:///\0", "FILE:///nowhere"),
    ],
)
def test_an_address_that_is_none(tmp_path: Path, uri: str) -> None:
    assert is_remote(uri)
    one_message(lambda: fetch(uri, tmp_path / "out"), 5)
    if "://" in uri:
        one_message(lambda: input_path(uri), 5)


@pytest.mark.parametrize("uri", ["ftp://host/x", "", "x" * 300, "a\0b", "/etc/passwd/x", "data:,x"])
def test_anything_but_an_address_is_a_path(tmp_path: Path, uri: str) -> None:
    assert not is_remote(uri)
    one_message(lambda: fetch(uri, tmp_path), 5)


@pytest.mark.parametrize(
    "endpoint",
    ["https://[::1", "127.0.0.1:9000", "http://", "http://h:99999", "http://k:the-secret@h", "ü"],
)
def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    error = one_message(lambda: exists("s3://bucket/key"), 5)
    assert error.what.startswith("AWS_ENDPOINT_URL=")


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "/loop", "ftp://127.0.0.1:1/x", "http://[::1"]
)
def test_a_redirect_that_leads_nowhere(tmp_path: Path, to: str) -> None:
    with server(always_sends(http("302 Found", b"", f"Location: {to}"))) as port:
        error = one_message(lambda: fetch(f"http://127.0.0.1:{port}/loop", tmp_path), 8)
    assert "root:" not in str(error)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", "5 bytes read, 94 more"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\nshort", "5 bytes read"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nsh",
            "",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nsh", ""),
    ],
)
def test_a_length_that_is_a_lie(tmp_path: Path, answer: bytes, says: str) -> None:
    with server(always_sends(answer)) as port, raises(Code.UNREACHABLE, f"127.0.0.1:{port}", says):
        fetch(f"http://127.0.0.1:{port}/f", tmp_path)


@pytest.mark.parametrize("length", ["x", "-3", "²"])
def test_a_non_numeric_length_is_ignored(tmp_path: Path, length: str) -> None:
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nhello".encode()
    with server(always_sends(answer)) as port:
        assert fetch(f"http://127.0.0.1:{port}/f", tmp_path).read_bytes() == b"hello"


@pytest.mark.parametrize("value", ["soon", "nan", "-1", "0", "inf", "1e9"])
def test_a_time_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LATHE_NETWORK_TIMEOUT", value)
    with raises(Code.INVALID_VALUE, f"LATHE_NETWORK_TIMEOUT={value}"):
        network_timeout()


def test_the_usual_limits_end_in_less_than_forty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATHE_NETWORK_TIMEOUT")
    assert network_timeout() == 15  # doubled for retries: see `retried`


def test_an_address_is_shown_without_what_is_secret() -> None:
    assert shown("http://u:p@host/x?sig=1#2") == "http://host/x"
    assert shown("s3://u:p@bucket/a@b") == "s3://bucket/a@b"
