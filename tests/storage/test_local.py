"""A local folder used as a store never replaces or deletes the user's files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lathe_base.artifacts.remote import output_path
from lathe_base.errors import Code
from lathe_base.storage import claim_address, exists, fetch, remove, upload, write_text
from lathe_base.storage.local import JOURNAL
from tests.support.errors import raises


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("A")
    (tmp_path / "source" / "b").write_text("B")
    return tmp_path / "source"


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["a folder of theirs", "a file of theirs", "edited", "a link"])
def test_files_of_others_are_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "home"
    if how == "a folder of theirs":
        home.mkdir()
    else:
        upload(source, f"file://{home}")
    if how == "a link":
        (home / "a").unlink()
        (home / "a").symlink_to(source / "a")
    else:
        (home / ("a" if how == "edited" else "thesis")).write_text("all of it")
    changed = "a" if how in ("edited", "a link") else "thesis"
    before = everything(home)
    for call in (
        lambda uri: upload(source, uri),
        remove,
        claim_address,
        output_path,
    ):
        for uri in (f"file://{home}", f"file://{home}/"):
            with raises(Code.EXISTS, home, changed):
                call(uri)
            assert everything(home) == before


def test_a_single_file_of_the_users_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    for call in (
        lambda uri: upload(source / "a", uri),
        lambda uri: write_text(uri, "x"),
        remove,
        claim_address,
    ):
        with raises(Code.EXISTS, "page.html"):
            call(f"file://{tmp_path}/page.html")
    assert (tmp_path / "page.html").read_text() == "mine"
    write_text(f"file://{tmp_path}/other.html", "1")
    write_text(f"file://{tmp_path}/other.html", "2")
    remove(f"file://{tmp_path}/other.html")
    assert sorted(os.listdir(tmp_path)) == ["page.html", "source"]


def test_a_folder_of_the_users_can_be_read(source: Path, tmp_path: Path) -> None:
    found = fetch(f"file://{source}/", tmp_path / "out")
    assert sorted(os.listdir(found)) == ["a", "b"]
    os.mkfifo(source / "pipe")
    with raises(Code.WRONG_KIND, source / "pipe"):
        fetch(f"file://{source}/", tmp_path / "other")
    with raises(Code.NOT_FOUND, "source/pipe"):
        fetch(f"file://{source}/pipe", tmp_path / "other")


def test_a_store_can_be_moved_and_copied(source: Path, tmp_path: Path) -> None:
    upload(source, f"file://{tmp_path}/one/p")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    (source / "a").write_text("new")
    upload(source, f"file://{tmp_path}/two/p")
    assert (tmp_path / "two/p/a").read_text() == "new"
    assert (tmp_path / "one/p/a").read_text() == "A"


def test_a_truncated_journal_line_is_skipped(source: Path, tmp_path: Path) -> None:
    """Such a line is left by a process killed while writing."""
    upload(source, f"file://{tmp_path}/store/p")
    with (tmp_path / "store" / JOURNAL).open("a") as journal:
        journal.write('\n{"name": "p/a", "et')
    upload(source, f"file://{tmp_path}/store/p")
    remove(f"file://{tmp_path}/store/p")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("renames", range(6))
def test_a_kill_at_any_moment(source: Path, tmp_path: Path, renames: int) -> None:
    """The process exits before its n-th rename: readers find nothing or everything, and the next
    upload can replace it."""
    uri = f"file://{tmp_path}/store/p"
    upload(source, uri)
    (source / "a").write_text("new")
    code = f"""
import os, sys
from pathlib import Path
from lathe_base.storage import upload
calls, replace = 0, os.replace
def dying(*arguments):
    global calls
    calls += 1
    if calls > {renames}:
        os._exit(9)
    replace(*arguments)
os.replace = dying
upload(Path(sys.argv[1]), sys.argv[2])
"""
    status = subprocess.run([sys.executable, "-c", code, str(source), uri]).returncode
    assert status == (0 if renames >= 3 else 9)
    if exists(f"{uri}/"):
        listed = json.loads((tmp_path / "store/p/.lathe.json").read_text())["files"]
        assert set(listed) == {"a", "b"}
        fetch(f"{uri}/", tmp_path / "between")
    upload(source, uri)
    found = fetch(f"{uri}/", tmp_path / "out")
    assert {p.name: p.read_text() for p in found.iterdir()} == {"a": "new", "b": "B"}
    remove(uri)
    assert not (tmp_path / "store").exists()
