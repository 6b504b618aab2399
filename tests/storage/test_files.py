"""Atomic outputs: complete or absent, and the user's files are never touched."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from lathe_base.artifacts.kinds import VERDICT
from lathe_base.errors import Code
from lathe_base.storage import (
    atomic_file,
    atomic_folder,
    claim_output_file,
    claim_output_folder,
    locked,
    sha256,
)
from lathe_base.storage import ownership as implementation
from lathe_base.storage.ownership import Kind
from tests.support.errors import raises

NOTE = Kind("note", "metadata.json", ("title",))


def write(output: Path, text: str = "new") -> None:
    """Write an output folder with three files and a metadata file."""
    with atomic_folder(output, NOTE) as work:
        (work / "sub").mkdir()
        for name in ("a", "sub/b", "sub/c"):
            (work / name).write_text(text)
        (work / "metadata.json").write_text('{"title": "t"}')


def read(folder: Path) -> dict[str, str]:
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_text() for name, p in files.items() if name != "metadata.json"}


def written(text: str) -> dict[str, str]:
    return dict.fromkeys(("a", "sub/b", "sub/c"), text)


@pytest.mark.parametrize("context", [atomic_file, lambda path: atomic_folder(path, NOTE)])
def test_failure_leaves_what_was_there(tmp_path: Path, context: object) -> None:
    target = tmp_path / "out"
    for fails in (True, False):
        try:
            with context(target) as work:  # type: ignore[operator]
                (work / "metadata.json" if work.is_dir() else work).write_text('{"title": 1}')
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == [target]


def test_a_metadata_lists_every_other_file(tmp_path: Path) -> None:
    write(tmp_path / "out")
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["title"] == "t" and set(metadata["files"]) == set(written(""))
    assert metadata["files"]["a"]["bytes"] == 3 and len(metadata["files"]["a"]["sha256"]) == 64


def test_an_earlier_output_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write(tmp_path / "out", text)
        assert read(tmp_path / "out") == written(text)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_block_without_a_metadata_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with atomic_folder(tmp_path / "out", NOTE) as work:
        (work / "a").write_text("half")
    assert read(tmp_path / "out") == written("old")


def foreign(output: Path, how: str) -> Path:
    """Make `output` contain something that Lathe did not write; returns the path at risk."""
    if how != "no metadata file":
        write(output, "old")
    output.mkdir(exist_ok=True)
    thesis = output / "sub" / "thesis.txt"
    match how:
        case "a metadata file of their own":
            (output / "metadata.json").write_text('{"title": "mine"}')
            return output / "metadata.json"
        case "an empty list":
            (output / "metadata.json").write_text('{"title": "mine", "files": {}}')
            return output / "metadata.json"
        case "an altered file":
            (output / "a").write_text("edited by hand")
            return output / "a"
        case "a link in place of a file":
            outside = output.with_name("photo.jpg")
            outside.write_text("old")
            (output / "a").unlink()
            (output / "a").symlink_to(outside)
            return output / "a"
        case "another kind":
            (output / "metadata.json").write_text('{"name": 1, "files": {}}')
            return output / "metadata.json"
        case "an empty folder":
            (output / "photos").mkdir()
            return output / "photos"
        case _:
            thesis.parent.mkdir(exist_ok=True)
            thesis.write_text("all of it")
            return thesis


@pytest.mark.parametrize(
    "how",
    [
        *(
            "no metadata file",
            "a file beside",
            "a metadata file of their own",
            "an empty list",
            "an altered file",
        ),
        *("a link in place of a file", "another kind", "an empty folder"),
    ],
)
def test_nothing_but_our_own_is_replaced(tmp_path: Path, how: str) -> None:
    output = tmp_path / "out"
    kept = foreign(output, how)
    before = sorted(tmp_path.rglob("*"))
    name = kept.relative_to(output).as_posix()
    for attempt in (write, lambda path: claim_output_folder(path, NOTE)):
        with raises(Code.EXISTS, name):
            attempt(output)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pipe_in_place_of_a_metadata_file(tmp_path: Path) -> None:
    """The pipe is not opened, which would block forever."""
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "metadata.json").unlink()
    os.mkfifo(tmp_path / "out" / "metadata.json")
    for attempt in (write, lambda path: claim_output_folder(path, NOTE)):
        with raises(Code.EXISTS, "metadata.json"):
            attempt(tmp_path / "out")


@pytest.mark.parametrize("given", ["out", "out/inner", "."])
def test_inputs_and_outputs_stay_apart(tmp_path: Path, given: str) -> None:
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / given)
    for path in (tmp_path / given, tmp_path / "link"):
        with raises(Code.CONFLICTING_OPTIONS, path):
            claim_output_folder(tmp_path / "out", NOTE, path)
    claim_output_folder(tmp_path / "other", NOTE, tmp_path / "out", "s3://bucket/other", None)


def test_a_file_replaces_its_own_kind_alone(tmp_path: Path) -> None:
    output = tmp_path / "gate.json"
    claim_output_file(output, VERDICT)
    output.write_text(json.dumps({"verdict": "pass", "passed": True, "reasons": []}))
    claim_output_file(output, VERDICT)
    for text in ('{"mine": 1}', "a diary", "[" * 100_000):
        output.write_text(text)
        with raises(Code.EXISTS, output, "verdict"):
            claim_output_file(output, VERDICT)
        assert output.read_text() == text
    with raises(Code.CONFLICTING_OPTIONS, tmp_path / "e"):
        claim_output_file(tmp_path / "e" / "metrics.json", VERDICT, tmp_path / "e")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_folder_is_written(tmp_path: Path, exists: bool) -> None:
    link, target = tmp_path / "run", tmp_path / "disk" / "big"
    link.symlink_to(target)
    if exists:
        target.mkdir(parents=True)
    for text in ("old", "new"):
        write(link, text)
        assert link.is_symlink() and read(target) == written(text)


def test_circular_links_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with raises(Code.BAD_PATH, tmp_path / "a"):
        write(tmp_path / "a")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that cannot be replaced: it is the working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_files_in_a_working_directory_are_replaced(here: Path) -> None:
    inode = here.stat().st_ino
    for text in ("old", "new"):
        write(Path("."), text)
        assert read(here) == written(text) and here.stat().st_ino == inode
    (here / "notes.txt").write_text("mine")
    with raises(Code.EXISTS, "notes.txt"):
        write(Path("."))
    assert read(here) == {**written("new"), "notes.txt": "mine"}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_mount_point_is_written_into(mount: Path) -> None:
    (mount / "lost+found").mkdir()
    for text in ("old", "new"):
        write(mount, text)
        assert mount.is_mount() and read(mount) == written(text)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("renames", range(7))
def test_a_kill_at_any_moment_leaves_it_whole_or_to_be_written_again(
    tmp_path: Path, in_place: bool, renames: int
) -> None:
    """The process exits without cleanup before its n-th rename."""
    output = tmp_path / "out"
    write(output, "old")
    child = os.fork()
    if not child:
        write_and_die(output, in_place, renames)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    if (output / "metadata.json").is_file():
        assert read_known(output) in (written("old"), written("new"))
    (tmp_path / "diary.txt").write_text("mine")
    write(output, "again")
    assert read(output) == written("again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["diary.txt", "out"]


def write_and_die(output: Path, in_place: bool, renames: int) -> NoReturn:
    """Write the output, then exit; exits early at the rename after `renames` others."""
    left = iter(range(renames))

    def dying(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if next(left, None) is None:
                os._exit(9)
            function(*arguments)

        return call

    try:
        if in_place:
            os.chdir(output)
        os.rename, os.replace = dying(os.rename), dying(os.replace)
        write(output, "new")
    except BaseException:
        os._exit(1)
    os._exit(0)


def read_known(folder: Path) -> dict[str, str]:
    """Read a folder, ignoring leftovers of a killed attempt in a folder that cannot be replaced."""
    return {name: text for name, text in read(folder).items() if not name.startswith(".lathe")}


def test_new_files_in_a_working_directory_are_kept(here: Path) -> None:
    write(Path("."), "old")
    with (
        raises(Code.EXISTS, "notes.txt"),
        atomic_folder(Path("."), NOTE) as work,
    ):
        (work / "metadata.json").write_text('{"title": "t"}')
        (here / "notes.txt").write_text("mine")
    assert read(here) == {**written("old"), "notes.txt": "mine"}


def test_files_added_meanwhile_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with atomic_folder(tmp_path / "out", NOTE) as work:
        (work / "metadata.json").write_text('{"title": "t"}')
        (tmp_path / "out" / "notes.txt").write_text("mine")
    (kept,) = tmp_path.glob("out.kept-*")
    assert (kept / "notes.txt").read_text() == "mine"


def test_files_edited_meanwhile_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with atomic_folder(tmp_path / "out", NOTE) as work:
        (work / "metadata.json").write_text('{"title": "t"}')
        (tmp_path / "out" / "a").write_text("by hand")
    (kept,) = tmp_path.glob("out.kept-*")
    assert read(kept) == {"a": "by hand"}


def test_a_metadata_that_lists_files_elsewhere_is_none(tmp_path: Path) -> None:
    """Otherwise, replacing the folder would delete them."""
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("all of it")
    (tmp_path / "out").mkdir()
    listed = {"../thesis.txt": sha256(thesis)}
    (tmp_path / "out" / "metadata.json").write_text(json.dumps({"title": "t", "files": listed}))
    with raises(Code.EXISTS, "metadata.json"):
        write(tmp_path / "out")
    assert thesis.read_text() == "all of it"


def test_a_failed_exchange_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "old")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == "new":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(implementation.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "out", "new")
    assert read(tmp_path / "out") == written("old")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_second_process_fails_at_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from lathe_base.storage import locked
with locked(pathlib.Path({str(tmp_path / "out")!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin and other.stdout and other.stdout.readline()
    started = time.monotonic()
    with raises(Code.IN_USE, tmp_path / "out"):
        write(tmp_path / "out")
    assert time.monotonic() - started < 10
    other.stdin.close()
    other.wait()
    assert not (tmp_path / "out").exists()
    with locked(tmp_path / "out"):
        pass
