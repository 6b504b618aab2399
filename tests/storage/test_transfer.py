"""Round trips to stores of each kind."""

import json
import os
import time
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.storage import (
    exists,
    fetch,
    list_uris,
    read_text,
    remove,
    sha256,
    upload,
    write_text,
)
from lathe_base.storage.parts import PART_BYTES
from tests.storage.conftest import Proxy
from tests.support.errors import raises

NAMES = ("a.txt", "empty", "more/b", "more/deep/ünï çødé #1 ?x=%2F&+.txt", "日本/語")


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with unusual names, an empty file, and a file of three parts."""
    for i, name in enumerate(NAMES):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(i * 1000) if name != "empty" else b"")
    (tmp_path / "source" / "big").write_bytes(os.urandom(2 * PART_BYTES + 7))
    return tmp_path / "source"


def test_folder(store: str, folder: Path, tmp_path: Path) -> None:
    upload(folder, f"{store}/p")
    listed = json.loads(read_text(f"{store}/p/.lathe.json"))["files"]
    assert {n: e["sha256"] for n, e in listed.items()} == {
        n: sha256(folder / n) for n in tree(folder)
    }
    for number, uri in enumerate(
        (f"{store}/p/", f"{store}/p", f"{store}/p/".replace("s3:", "minio:", 1))
    ):
        found = fetch(uri, tmp_path / f"{number}")
        assert found == tmp_path / f"{number}"
        assert tree(found) == tree(folder)
        assert sorted(os.listdir(found)) == ["a.txt", "big", "empty", "more", "日本"]


def test_file(store: str, folder: Path, tmp_path: Path) -> None:
    for name in ("big", "empty", NAMES[3]):
        upload(folder / name, f"{store}/x/{name}")
        found = fetch(f"{store}/x/{name}", tmp_path / "out")
        assert found == tmp_path / "out" / Path(name).name
        assert found.read_bytes() == (folder / name).read_bytes()
    assert len(os.listdir(tmp_path / "out")) == 3
    with raises(Code.BAD_PATH, f"{store}/x/"):
        upload(folder / "big", f"{store}/x/")


def test_objects_that_others_put(store: str, tmp_path: Path) -> None:
    write_text(f"{store}/p/a", "A")
    write_text(f"{store}/p/b/c", "C")
    assert tree(fetch(f"{store}/p/", tmp_path)) == {"a": b"A", "b/c": b"C"}


def test_uploaded_files_are_not_sent_again(
    s3: str, folder: Path, tmp_path: Path, proxy: Proxy
) -> None:
    upload(folder, f"{s3}/p")
    assert proxy.up > (folder / "big").stat().st_size
    proxy.mend()
    upload(folder, f"{s3}/p")
    assert proxy.up < 20_000
    fetch(f"{s3}/p/", tmp_path / "out")
    (tmp_path / "out/a.txt").write_text("spoilt")
    proxy.mend()
    assert tree(fetch(f"{s3}/p/", tmp_path / "out")) == tree(folder)
    assert proxy.down < 20_000


def test_a_prefix_is_replaced(store: str, folder: Path, tmp_path: Path) -> None:
    upload(folder, f"{store}/p")
    (folder / "big").write_bytes(os.urandom(2 * PART_BYTES + 7))
    (folder / "a.txt").rename(folder / "c.txt")
    upload(folder, f"{store}/p")
    assert tree(fetch(f"{store}/p/", tmp_path / "out")) == tree(folder)
    assert f"{store}/p/a.txt" not in list_uris(f"{store}/p/")


@pytest.mark.slow
def test_a_thousand_small_files(store: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for i in range(1000):
        (tmp_path / f"source/{i:04}").write_text(f"{i}" * (i % 50))
    upload(tmp_path / "source", f"{store}/many/")
    assert tree(fetch(f"{store}/many/", tmp_path / "out")) == tree(tmp_path / "source")
    remove(f"{store}/many/")
    assert not exists(f"{store}/many/")


def test_small_requests(store: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for name in ("2026-03", "2026-01", "2026-02"):
        upload(tmp_path, f"{store}/runs/{name}")
    write_text(f"{store}/runs/live.json", "ä")
    assert read_text(f"{store}/runs/live.json") == "ä"
    # A set, since order depends on the resolution of the store's clock.
    assert set(list_uris(f"{store}/runs")) == {
        *(f"{store}/runs/{name}" for name in ("2026-01/", "2026-02/", "2026-03/", "live.json"))
    }
    assert list_uris(f"{store}/runs/2026-01/") == [f"{store}/runs/2026-01/f"]
    assert list_uris(f"{store}/nothing/") == []
    for name, there in (("2026-01", True), ("2026-01/", True), ("live.json", True), ("x", False)):
        assert exists(f"{store}/runs/{name}") == there
    remove(f"{store}/runs/2026-01")
    remove(f"{store}/runs/live.json")
    remove(f"{store}/runs/never-there")
    assert len(list_uris(f"{store}/runs/")) == 2
    with raises(Code.NOT_FOUND, f"{store}/runs/live.json"):
        read_text(f"{store}/runs/live.json")


def test_children_by_age(store: str) -> None:
    for name in ("b", "a", "c"):
        write_text(f"{store}/runs/{name}/f", "x")
        time.sleep(0.02)
    assert list_uris(f"{store}/runs/") == [f"{store}/runs/{name}/" for name in "bac"]
    write_text(f"{store}/runs/a/new", "x")
    assert list_uris(f"{store}/runs/") == [f"{store}/runs/{name}/" for name in "bca"]


def test_partial_objects_are_invisible(store: str, tmp_path: Path) -> None:
    write_text(f"{store}/x/d/.lathe.unfinished", "")
    write_text(f"{store}/x/d/f", "")
    write_text(f"{store}/x/e", "")
    assert list_uris(f"{store}/x/") == [f"{store}/x/e"]
    assert not exists(f"{store}/x/d") and exists(f"{store}/x/e")
    with raises(Code.INCOMPLETE, f"{store}/x/d/"):
        fetch(f"{store}/x/d/", tmp_path)


def test_a_folder_that_no_store_can_keep(store: str, tmp_path: Path) -> None:
    with raises(Code.INCOMPLETE, tmp_path):
        upload(tmp_path, f"{store}/p")
    (tmp_path / "link").symlink_to("/tmp", target_is_directory=True)
    with raises(Code.WRONG_KIND, tmp_path / "link"):
        upload(tmp_path, f"{store}/p")
    (tmp_path / "link").unlink()
    (tmp_path / "gone").symlink_to("nowhere")
    with raises(Code.WRONG_KIND, tmp_path / "gone"):
        upload(tmp_path, f"{store}/p")
    (tmp_path / "gone").unlink()
    (tmp_path / ".lathe.partial").mkdir()
    with raises(Code.INCOMPLETE, tmp_path):
        upload(tmp_path, f"{store}/p")
    assert not exists(f"{store}/p")
