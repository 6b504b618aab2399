"""Cache keys of a local run's finished tasks, and damaged caches, whose tasks run again without a
traceback."""

import functools
import json
import os
from pathlib import Path

import pytest
from kfp import dsl

from components.plan import plan
from lathe.data.run_inputs import look_up
from lathe_base.config.recipe import load_recipe
from pipelines.local.log import StageLog
from pipelines.local.runner import CheckedCache, key_parts
from tests.pipelines.test_run import ran
from tests.support.tables import quick_only

COMMAND = ["sh", "--executor_input", "{{$}}", "--function_to_execute", "pretrain"]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "run" / "pretrain" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def cache(tmp_path, model):
    """A cache with an entry for the task `pretrain` under `cache_key`."""
    made = CheckedCache(str(tmp_path / "cache"))
    made.put(cache_key(made), {"model": dsl.Model(name="model", uri=str(model)), "Output": 3})
    return made


@functools.cache
def settings(*overrides: str) -> str:
    return plan("tiny", overrides)["pretrain"]


def cache_key(cache: CheckedCache, *overrides: str, **arguments: object) -> str:
    given = {"recipe": settings(*overrides)} | arguments
    return cache.compute_key("comp-pretrain", "image", COMMAND, given)


def entry(cache: CheckedCache) -> Path:
    return Path(cache.cache_root) / f"{cache_key(cache)}.json"


def test_unchanged_steps_are_reused(cache, model):
    (model / "notes.txt").write_text("the user's own")
    (model / ".verified").touch()
    outputs = cache.get(cache_key(cache))
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
@pytest.mark.parametrize("suffix", quick_only([".json", ".made"], [".json"]))
def test_a_damaged_entry_is_done_again(cache, damage, suffix, caplog):
    entry(cache).with_suffix(suffix).write_bytes(damage)
    with caplog.at_level("INFO"):
        assert cache.get(cache_key(cache)) is None
    assert caplog.messages == [f"Task pretrain runs again: {entry(cache)} is corrupt"]
    shown = list(StageLog().feed(f"INFO:root:{caplog.messages[0]}\n"))
    assert shown == [f"pretrain runs again: {entry(cache)} is corrupt"]


@pytest.mark.parametrize("suffix", [".json", ".made"])
def test_a_folder_in_place_of_an_entry_is_ignored(cache, suffix):
    path = entry(cache).with_suffix(suffix)
    path.unlink()
    path.mkdir()
    assert cache.get(cache_key(cache)) is None


def test_a_file_that_changed_or_went_is_made_again(cache, model, caplog):
    weights = model / "model.safetensors"
    weights.write_bytes(b"other weights")
    with caplog.at_level("INFO"):
        assert cache.get(cache_key(cache)) is None
        weights.unlink()
        assert cache.get(cache_key(cache)) is None
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        f"{weights} has changed",
        f"{weights} is missing",
    ]


def test_a_file_that_changed_but_not_in_length_is_made_again(cache, model, caplog):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    os.utime(weights, ns=(0, 0))  # both writes may be within one tick of the file system's clock
    with caplog.at_level("INFO"):
        assert cache.get(cache_key(cache)) is None
    assert caplog.messages[0].endswith(f"{weights} has changed")


@pytest.mark.parametrize(
    "overrides, arguments, changed",
    [
        (["Optimizer.lr.max_lr=1e-3"], {}, "recipe Optimizer"),
        ([], {"contents": {"s3://b/gpt": "etag 1"}}, "contents of s3://b/gpt"),
        ([], {"init": "s3://b/gpt"}, "input init"),
    ],
)
def test_a_task_that_is_not_the_same_says_what_changed(
    cache, overrides, arguments, changed, caplog
):
    with caplog.at_level("INFO"):
        assert cache.get(cache_key(cache, *overrides, **arguments)) is None
    assert caplog.messages == [f"Task pretrain runs again: changed: {changed}"]


def test_a_setting_that_its_code_does_not_read_changes_nothing(cache):
    assert cache.get(cache_key(cache, "Production.burst_clients=3")) is not None
    assert cache.get(cache_key(cache, "Engine.max_steps=60")) is None


def test_other_code_is_another_task(cache, monkeypatch, caplog):
    monkeypatch.setattr("pipelines.local.runner.code_digest", lambda: "0" * 64)
    with caplog.at_level("INFO"):
        assert cache.get(cache_key(cache)) is None
    assert caplog.messages == ["Task pretrain runs again: changed: code"]


def test_a_setting_written_otherwise_is_the_same(cache):
    values = load_recipe("tiny", []).model_dump_json(indent=1)
    assert cache.get(cache_key(cache, recipe=plan(values, [])["pretrain"])) is not None


def test_every_recipe_of_a_task_counts_by_its_settings(cache):
    values = load_recipe("tiny", []).model_dump_json(indent=1)
    key = cache_key(cache, qat_recipe="tiny")
    assert cache_key(cache, qat_recipe=values) == key
    assert cache_key(cache, qat_recipe="tiny-qat") != key


def test_an_artifact_is_known_by_its_bytes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(b"1234")

    def known() -> str:
        given = {"recipe": "tiny", "overrides": [], "data": dsl.Dataset(uri=str(folder))}
        return key_parts("evaluate", given)["input data"]

    before = known()
    (folder / "tokens.bin").write_bytes(b"1235")
    assert known() != before
    (folder / "tokens.bin").write_bytes(b"1234")
    assert known() == before


def test_one_byte_of_the_corpus_behind_the_same_path_is_another_input(tmp_path):
    corpus, recipe = tmp_path / "corpus.txt", load_recipe("tiny", [])
    corpus.write_text("one")
    before = look_up([recipe], str(corpus))
    assert look_up([recipe], str(corpus)) == before
    corpus.write_text("ona")
    after = look_up([recipe], str(corpus))
    assert (before.text, before.scored) != (after.text, after.scored) == (after.text, {})


def test_the_table_says_of_every_step_whether_it_was_reused_or_why_not():
    log = StageLog()
    lines = [
        "Task prepare cache hit (key=0); skipping execution.",
        "Task tokenize runs again: changed: code",
        "Executing task 'tokenize'",
        "Task tokenize runs again: changed: code",
        "Executing task 'tokenize'",
        "Executing task 'gate'",
    ]
    for line in lines:
        list(log.feed(f"INFO:root:{line}\n"))
    assert list(log.reuse()) == [
        "prepare   reused",
        "tokenize  changed: code (2 times)",
        "gate      always runs",
    ]


def test_a_first_run_has_nothing_to_say_of_reuse():
    log = StageLog()
    list(log.feed("INFO:root:Task prepare runs for the first time\n"))
    list(log.feed("INFO:root:Executing task 'prepare'\n"))
    assert list(log.reuse()) == []


@pytest.mark.slow
def test_only_what_depends_on_an_edit_is_done_again(tmp_path, recipe, corpus):
    def run(*overrides: str) -> list[str]:
        arguments = ["--recipe", recipe, "--corpus", corpus, "--name", "one"]
        out = ran(tmp_path, "pretrain", *arguments, *overrides)
        table = [line for line in out.splitlines() if "  " in line and not line.startswith(" ")]
        return [line.split(maxsplit=1)[1] for line in table[:3]]

    run()
    assert run() == ["reused"] * 3
    assert run("-o", "Gate.max_accuracy_drop=0.5") == ["reused"] * 3
    assert run("-o", "Optimizer.lr.max_lr=1e-3") == [
        "reused",
        "changed: recipe Optimizer",
        "changed: input model",
    ]
    first = corpus / "00.txt"
    first.write_text(first.read_text().replace("T", "t", 1))
    assert run("-o", "Optimizer.lr.max_lr=1e-3")[0] == f"changed: contents of {corpus}"
