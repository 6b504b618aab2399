"""Fetching from a web server on the loopback interface."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.ports import free_port
from lathe_base.storage import fetch
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert fetch(str(tmp_path), Path("unused")) == tmp_path
    with raises(Code.NOT_FOUND, tmp_path / "nothing"):
        fetch(str(tmp_path / "nothing"), Path("unused"))
    with raises(Code.BAD_PATH):  # Path("") would be the working directory
        fetch("", Path("unused"))


class Flaky(QuietHandler):
    """`/busy` responds with 503 twice and then works; `/cut` sends less than its Content-Length."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        busy = self.path == "/busy" and self.requests.count("/busy") <= 2
        codes = {"/secret": 403, "/moved": 302}
        length = "9" if self.path == "/cut" else "5"
        headers = {"Location": "/busy", "Content-Length": length}
        self.reply(b"hello", 503 if busy else codes.get(self.path, 200), headers)


@pytest.fixture
def http() -> Iterator[str]:
    Flaky.requests = []
    with LoopbackServer(Flaky) as server:
        yield server.url


def test_http_is_tried_again_and_follows_redirects(http: str, tmp_path: Path) -> None:
    assert fetch(f"{http}/busy", tmp_path).read_bytes() == b"hello"
    assert Flaky.requests == ["/busy"] * 3
    assert fetch(f"{http}/moved", tmp_path) == tmp_path / "moved"


def test_http_errors(http: str, tmp_path: Path) -> None:
    with raises(Code.FORBIDDEN, "/secret", "403"):
        fetch(f"{http}/secret", tmp_path)
    assert Flaky.requests == ["/secret"]  # not retried
    with raises(Code.UNREACHABLE, "5 bytes read, 4 more expected"):
        fetch(f"{http}/cut", tmp_path)
    with raises(Code.UNREACHABLE, "http://127.0.0.1:"):
        fetch(f"http://127.0.0.1:{free_port()}/x", tmp_path)
    assert list(tmp_path.iterdir()) == []
