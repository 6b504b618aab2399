"""Files are verified against their metadata; large ones are read only once."""

import os
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.storage import files, sha256
from lathe_base.storage.files import require_intact
from tests.support.errors import raises


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path, cache: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "small").write_bytes(b"a few bytes")
    (folder / "large").write_bytes(bytes(files.LARGE))
    return folder


def check(folder: Path, files: dict[str, str]) -> None:
    require_intact(folder, files, "metadata.json", "copy it again")


def test_a_large_file_is_hashed_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    listed = {path.name: sha256(path) for path in data.iterdir()}
    monkeypatch.setattr(files, "sha256", counting)
    for _ in range(3):
        check(data, listed)
    assert sorted(hashed) == ["large", "small", "small", "small"]


@pytest.mark.parametrize("name", ["small", "large"])
def test_one_flipped_byte_is_found_whatever_the_times_say(data: Path, name: str) -> None:
    listed = {path.name: sha256(path) for path in data.iterdir()}
    check(data, listed)
    before = (data / name).stat()
    with (data / name).open("r+b") as file:
        file.seek(5)
        file.write(b"\xff")
    os.utime(data / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    with raises(Code.CORRUPT, name, "metadata.json"):
        check(data, listed)


def test_nothing_is_written_beside_an_input(data: Path, cache: Path) -> None:
    before = sorted(data.parent.rglob("*"))
    check(data, {"large": sha256(data / "large")})
    added = set(data.parent.rglob("*")) - set(before)
    assert added and all(path.is_relative_to(cache) for path in added)


def test_a_cache_that_cannot_be_written_is_done_without(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    for _ in range(2):
        check(data, {"large": sha256(data / "large")})
    with raises(Code.CORRUPT, "large"):
        check(data, {"large": "0" * 64})
