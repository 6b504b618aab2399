"""A run folder whose cache, or what the cache names, was damaged: done again, and no traceback."""

import json
from pathlib import Path

import pytest
from kfp import dsl

from pipelines.cache import CheckedCache
from pipelines.log import StageLog


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "run" / "pretrain" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def cache(tmp_path, model):
    """One that remembers the task `pretrain` under `key_of`."""
    made = CheckedCache(str(tmp_path / "cache"))
    made.put(key_of(made), {"model": dsl.Model(name="model", uri=str(model)), "Output": 3})
    return made


def key_of(cache: CheckedCache) -> str:
    return cache.compute_key(
        component_name="comp-pretrain", image="image", full_command=["sh"], arguments={}
    )


def entry(cache: CheckedCache) -> Path:
    return Path(cache.cache_root) / f"{key_of(cache)}.json"


def test_what_is_as_it_was_is_reused(cache, model):
    (model / "notes.txt").write_text("the user's own")
    (model / ".verified").touch()
    outputs = cache.get(key_of(cache))
    assert outputs["Output"] == 3 and outputs["model"].uri == str(model)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{}",
        b"3",
        b"[" * 100_000,
        json.dumps({"model": {"__kfp_artifact__": True}}).encode(),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".made"])
def test_a_damaged_entry_is_done_again(cache, damage, suffix, caplog):
    entry(cache).with_suffix(suffix).write_bytes(damage)
    with caplog.at_level("INFO"):
        assert cache.get(key_of(cache)) is None
    assert caplog.messages == [f"Task pretrain is done again: {entry(cache)} is damaged"]
    shown = list(StageLog().feed(f"INFO:root:{caplog.messages[0]}\n"))
    assert shown == [f"pretrain is done again: {entry(cache)} is damaged"]


@pytest.mark.parametrize("suffix", [".json", ".made"])
def test_a_folder_in_place_of_an_entry_is_no_entry(cache, suffix):
    path = entry(cache).with_suffix(suffix)
    path.unlink()
    path.mkdir()
    assert cache.get(key_of(cache)) is None


def test_a_file_that_changed_or_went_is_made_again(cache, model, caplog):
    weights = model / "model.safetensors"
    weights.write_bytes(b"other weights")
    with caplog.at_level("INFO"):
        assert cache.get(key_of(cache)) is None
        weights.unlink()
        assert cache.get(key_of(cache)) is None
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        f"{weights} has changed",
        f"{weights} is missing",
    ]
