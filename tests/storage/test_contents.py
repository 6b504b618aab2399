"""The identity of a path's or address's contents changes if and only if the bytes do."""

import os
from pathlib import Path
from typing import ClassVar

import pytest

from lathe_base.errors import Code
from lathe_base.storage import upload, write_text
from lathe_base.storage.files import LARGE
from lathe_base.storage.objects import UNKNOWN, content_id
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler


def test_one_byte_of_a_file_and_the_name_of_a_file_in_a_folder_count(tmp_path: Path) -> None:
    file = tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    file.write_text("one")
    states = [(content_id(str(file)), content_id(str(file.parent)))]
    assert (content_id(str(file)), content_id(str(file.parent))) == states[0]
    file.write_text("ona")
    states.append((content_id(str(file)), content_id(str(file.parent))))
    assert states[0][0] != states[1][0] and states[0][1] != states[1][1]
    file.rename(file.with_name("b.txt"))
    assert content_id(str(file.parent)) != states[1][1]
    before = content_id(str(file.parent))
    (file.parent / ".hidden").touch()
    assert content_id(str(file.parent)) == before


def test_a_large_file_is_read_again_only_when_its_times_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "large"
    file.write_bytes(bytes(LARGE))
    before = content_id(str(file))
    read: list[Path] = []
    monkeypatch.setattr("lathe_base.storage.files.sha256", lambda path: read.append(path) or "0")
    assert content_id(str(file)) == before and not read
    os.utime(file)
    assert content_id(str(file)) == "sha256 0" and read == [file]


def test_nothing_there_is_the_users_mistake(tmp_path: Path) -> None:
    with raises(Code.NOT_FOUND, tmp_path / "missing"):
        content_id(str(tmp_path / "missing"))


def test_one_byte_behind_the_same_address_counts(s3: str, tmp_path: Path) -> None:
    address = f"{s3}/texts/a.txt"
    write_text(address, "one")
    states = [(content_id(address), content_id(f"{s3}/texts/"))]
    assert (content_id(address), content_id(f"{s3}/texts/")) == states[0]
    write_text(address, "ona")
    states.append((content_id(address), content_id(f"{s3}/texts/")))
    assert states[0][0] != states[1][0] and states[0][1] != states[1][1]
    (tmp_path / "more").write_text("more")
    upload(tmp_path / "more", f"{s3}/texts/b.txt")
    assert content_id(f"{s3}/texts/") != states[1][1]
    with raises(Code.NOT_FOUND, f"{s3}/nowhere/"):
        content_id(f"{s3}/nowhere/")


class Server(QuietHandler):
    """Responds to HEAD with `headers_sent`."""

    headers_sent: ClassVar[dict[str, str]] = {}
    status = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.mark.parametrize(
    "status, headers, expected",
    [
        (200, {"ETag": '"1"', "Content-Length": "3"}, 'http "1"'),
        (200, {"ETag": 'W/"1"'}, None),
        (200, {"Content-Length": "3", "Last-Modified": "now"}, "http 3 bytes, now"),
        (200, {"Content-Length": "3"}, None),
        (405, {}, None),
    ],
)
def test_contents_without_a_validator_never_compare_equal(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(Server, "headers_sent", headers)
    monkeypatch.setattr(Server, "status", status)
    with LoopbackServer(Server) as server:
        first, second = content_id(f"{server.url}/a.txt"), content_id(f"{server.url}/a.txt")
    if expected:
        assert first == second == expected
    else:
        assert first.startswith(UNKNOWN) and second.startswith(UNKNOWN) and first != second
