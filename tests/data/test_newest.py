"""Finding the newest corpus in a folder, and below a prefix in a real store."""

import json
import os
import time
from pathlib import Path

import pytest

from lathe.data.prepare import prepare
from lathe.data.run_inputs import resolve
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from lathe_base.storage import remove, upload, write_text
from tests.support.errors import raises
from tests.support.small_run import SMALL


def test_other_sources_stay_unchanged(tmp_path: Path) -> None:
    for source in ("python", "s3://bucket/corpora/", str(tmp_path), "hf://name::train"):
        assert resolve(source) == source


def test_in_a_folder(tmp_path: Path) -> None:
    with raises(Code.NOT_FOUND, f"newest:{tmp_path}", f"{tmp_path}/NAME/"):
        resolve(f"newest:{tmp_path}")
    with raises(Code.NOT_FOUND, f"newest:{tmp_path}/corpora"):
        resolve(f"newest:{tmp_path}/corpora")
    names = ("monday.txt", "tuesday/a.txt", "wednesday.jsonl", ".thursday.txt.part")
    for age, name in enumerate(reversed(names)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    assert resolve(f"newest:{tmp_path}") == str(tmp_path / "wednesday.jsonl")
    os.utime(tmp_path / "tuesday/a.txt", (2e9, 2e9))
    assert resolve(f"newest:{tmp_path}/") == str(tmp_path / "tuesday")


def test_below_a_prefix_only_what_is_whole(
    s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"newest:{s3}/corpora/"
    with raises(Code.NOT_FOUND, place, f"{s3}/corpora/NAME/"):
        resolve(place)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("a")
    write_text(f"{s3}/corpora/first.txt", "1")
    time.sleep(1.1)  # the store's timestamps have a resolution of seconds
    assert resolve(place) == f"{s3}/corpora/first.txt"
    upload(tmp_path / "folder", f"{s3}/corpora/second/")
    time.sleep(1.1)
    assert resolve(place) == f"{s3}/corpora/second/"
    write_text(f"{s3}/corpora/third/part-1.txt", "half of it")
    assert resolve(place) == f"{s3}/corpora/second/"
    assert f"skipping {s3}/corpora/third/" in caplog.text
    write_text(f"{s3}/corpora/zeroth.txt", "4")
    assert resolve(place) == f"{s3}/corpora/zeroth.txt"
    remove(f"{s3}/corpora/zeroth.txt")
    assert resolve(place) == f"{s3}/corpora/second/"


def test_prepare_takes_and_records_it(s3: str, tmp_path: Path, small_data: Path) -> None:
    corpus = small_data.parent / "corpus.txt"
    upload(corpus, f"{s3}/corpora/2026-11.txt")
    tokenizer = str(small_data / "tokenizer.json")
    made = prepare(
        load_recipe("tiny", SMALL), tmp_path / "data", f"newest:{s3}/corpora/", tokenizer
    )
    metadata = json.loads((made.folder / "data.json").read_text())
    assert metadata["source"] == f"{s3}/corpora/2026-11.txt"
    assert metadata["made_from"] == json.loads((small_data / "data.json").read_text())["made_from"]
