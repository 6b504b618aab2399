"""Behaviour common to all stores: resuming, conditional replacement, and the manifest last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.storage import (
    exists,
    fetch,
    list_uris,
    read_text,
    remove,
    replace_text,
    upload,
    write_text,
)
from lathe_base.storage.local import LocalMultipart
from lathe_base.storage.object_store import STORES, ObjectStore, open_store
from lathe_base.storage.parts import PART_BYTES
from lathe_base.storage.s3 import S3Multipart
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler

PARTS = 6
DIES_AFTER = """
import os, sys
from pathlib import Path
from lathe_base.storage import fetch, parts, upload
parts.CONNECTIONS = 2
calls = 0
def advance(self, size):
    global calls
    calls += 1
    if calls == 4:
        os._exit(9)
parts.ByteProgress.advance = advance
verb, path, uri = sys.argv[1:]
upload(Path(path), uri) if verb == "put" else fetch(uri, Path(path))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "big").write_bytes(os.urandom(PARTS * PART_BYTES - 11))
    (folder / "small").write_text("s")
    return folder


def killed(verb: str, path: Path, uri: str) -> None:
    """Run an operation in a process that dies in the middle of it."""
    ended = subprocess.run([sys.executable, "-c", DIES_AFTER, verb, str(path), uri])
    assert ended.returncode == 9


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the parts that this process sends."""
    numbers: list[int] = []
    for kind in (S3Multipart, LocalMultipart):
        put = kind.put

        def counting(
            self: object, number: int, data: bytes, md5: bytes, put: object = put
        ) -> object:
            numbers.append(number)
            return put(self, number, data, md5)  # type: ignore[operator]

        monkeypatch.setattr(kind, "put", counting)
    return numbers


@pytest.mark.slow
def test_a_killed_upload_resumes(store: str, source: Path, tmp_path: Path, sent: list[int]) -> None:
    store += "/runs"
    killed("put", source, f"{store}/p")
    assert not exists(f"{store}/p/") and list_uris(f"{store}/") == []
    with raises(Code.INCOMPLETE, f"{store}/p/"):
        fetch(f"{store}/p/", tmp_path / "between")
    upload(source, f"{store}/p")
    assert 0 < len(sent) <= PARTS - 3
    found = fetch(f"{store}/p/", tmp_path / "out")
    assert (found / "big").read_bytes() == (source / "big").read_bytes()
    sent.clear()
    upload(source, f"{store}/p")
    assert sent == []


@pytest.mark.slow
def test_a_killed_upload_of_other_bytes(store: str, source: Path, tmp_path: Path) -> None:
    killed("put", source / "big", f"{store}/f")
    assert not exists(f"{store}/f")
    (source / "big").write_bytes(os.urandom(PARTS * PART_BYTES - 11))
    upload(source / "big", f"{store}/f")
    assert fetch(f"{store}/f", tmp_path / "out").read_bytes() == (source / "big").read_bytes()


def test_a_killed_fetch_resumes(store: str, source: Path, tmp_path: Path) -> None:
    upload(source, f"{store}/p")
    killed("get", tmp_path / "out", f"{store}/p/")
    assert os.listdir(tmp_path / "out") == [".lathe.partial"]
    fetch(f"{store}/p/", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["big", "small"]
    assert (tmp_path / "out/big").read_bytes() == (source / "big").read_bytes()


def test_the_manifest_is_put_last(
    store: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(open_store(store + "/p")[0])
    keys: list[str] = []
    put = kind.put

    def recording(self: ObjectStore, key: str, *arguments: object, **named: object) -> object:
        assert not exists(f"{store}/p/")
        keys.append(key.rpartition("/")[2])
        return put(self, key, *arguments, **named)

    monkeypatch.setattr(kind, "put", recording)
    upload(source, f"{store}/p")
    assert keys == [".lathe.unfinished", "small", ".lathe.json"]


def test_a_pointer_is_moved_on_a_condition(store: str) -> None:
    uri = f"{store}/live.json"
    with raises(Code.CHANGED, uri):
        replace_text(uri, "1", seen="0")
    assert not exists(uri)
    replace_text(uri, "1", seen=None)
    replace_text(uri, "2", seen="1")
    for seen in ("1", None):
        with raises(Code.CHANGED, uri):
            replace_text(uri, "3", seen=seen)
    assert read_text(uri) == "2"


@pytest.mark.slow
def test_an_object_that_changes_while_it_is_fetched(
    store: str, source: Path, tmp_path: Path
) -> None:
    upload(source / "big", f"{store}/f")
    kind = type(open_store(f"{store}/f")[0])
    stat = kind.stat
    with pytest.MonkeyPatch.context() as patch:

        def then_changed(self: ObjectStore, key: str) -> object:
            found = stat(self, key)
            patch.undo()
            (source / "big").write_bytes(os.urandom(PARTS * PART_BYTES - 11))
            upload(source / "big", f"{store}/f")
            return found

        patch.setattr(kind, "stat", then_changed)
        with raises(Code.CHANGED, f"{store}/f"):
            fetch(f"{store}/f", tmp_path / "out")


def test_a_removed_prefix_leaves_nothing(store: str, source: Path) -> None:
    upload(source, f"{store}/runs/a")
    write_text(f"{store}/runs/b.state/x/y", "1")
    remove(f"{store}/runs/a")
    assert list_uris(f"{store}/runs/") == [f"{store}/runs/b.state/"]
    remove(f"{store}/runs/b.state/")
    assert list_uris(f"{store}/runs/") == [] and not exists(f"{store}/runs")


def test_every_scheme_has_a_store() -> None:
    for scheme in STORES:
        address = f"{scheme}:///folder/key" if scheme == "file" else f"{scheme}://bucket/key"
        store, key = open_store(address)
        assert store.address(key) == address


def test_a_custom_store_is_not_queried_for_the_buckets_location(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys restricted to part of a bucket, such as a Kubeflow profile's, may not read it."""
    asked: list[str] = []

    class Store(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.reply(status=403)

        do_HEAD = do_GET

    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "0123456789")
    with LoopbackServer(Store) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with raises(Code.FORBIDDEN):
            exists("s3://bucket/private/lathe/key")
    assert asked and not any("location" in path for path in asked)
