"""Ownership of training output folders, and which files in them are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lathe.train.pretrain import pretrain
from lathe.train.result import CLAIM, begin, claim, claimed, remove_run, run_identity
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL

OURS = {"settings": "a" * 64, "global_batch_size": 8, "data": "b" * 64}
OTHERS = OURS | {"settings": "c" * 64}


def test_a_folder_is_this_runs_another_runs_or_the_users(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with claimed(output, OURS):
        begin(output, OURS)
        (output / "state" / "step_00000004").mkdir(parents=True)
    claim(output, OURS)
    with raises(Code.STATE_MISMATCH, output):
        claim(output, OTHERS)
    (output / CLAIM).unlink()
    with raises(Code.EXISTS, output, "state"):
        claim(output, OURS)


def test_the_settings_that_differ_are_named(small_data: Path, tmp_path: Path) -> None:
    ours, others = (
        run_identity(load_recipe("tiny", [*SMALL, *changes]), {}, small_data, 1)
        for changes in (
            ["Engine.max_steps=8"],
            ["Engine.max_steps=7", "Optimizer.lr.max_lr=1e-3", "Engine.eval_freq=3"],
        )
    )
    with claimed(tmp_path, ours):
        begin(tmp_path, ours)
        (tmp_path / "state" / "step_00000004").mkdir(parents=True)
    with raises(Code.STATE_MISMATCH, "Engine.max_steps=8, now 7", ".max_lr=") as said:
        claim(tmp_path, others)
    assert "eval_freq" not in str(said.value)


@pytest.mark.parametrize("change", ["Engine.compile=true", "Engine.deterministic=false"])
def test_how_a_gpu_computes_may_change(small_data: Path, change: str) -> None:
    ours, resumed = (
        run_identity(load_recipe("tiny", [*SMALL, *changes]), {}, small_data, 1)
        for changes in ([], [change])
    )
    assert ours == resumed


@pytest.mark.parametrize("text", ['{"mine": 1}', "[]", "a diary", json.dumps({"settings": "x"})])
def test_a_file_of_the_same_name_is_the_users(tmp_path: Path, text: str) -> None:
    (tmp_path / CLAIM).write_text(text)
    with (
        raises(Code.EXISTS, tmp_path, "run.json"),
        claimed(tmp_path, OURS),
    ):
        pass
    remove_run(tmp_path)
    assert (tmp_path / CLAIM).read_text() == text


def test_a_run_that_saved_nothing_makes_room(tmp_path: Path) -> None:
    with claimed(tmp_path, OURS):
        begin(tmp_path, OURS)
        (tmp_path / "train.jsonl").write_text("")
        (tmp_path / "state").mkdir()
    with claimed(tmp_path, OTHERS):
        begin(tmp_path, OTHERS)
    claim(tmp_path, OTHERS)


def test_a_failure_before_the_first_step_leaves_nothing(small_data: Path, tmp_path: Path) -> None:
    too_wide = load_recipe("tiny", (*SMALL, "Data.Eval.dataset.max_seq_len=64"))
    with raises(Code.TOO_LONG, "Data.Eval.dataset.max_seq_len 64"):
        pretrain(too_wide, small_data, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
    pretrain(load_recipe("tiny", (*SMALL, "Engine.max_steps=1")), small_data, tmp_path / "out")


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    begin(tmp_path, OURS)
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "state" / "step_00000004").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "state" / "photo.jpg").write_text("mine")
    remove_run(tmp_path)
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["notes.txt", "state/photo.jpg"]


def test_a_second_training_into_one_folder_fails_at_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from lathe.train.result import claimed
with claimed(pathlib.Path({str(tmp_path / "out")!r}), {OURS}):
    print("held", flush=True)
    sys.stdin.read()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin and first.stdout and first.stdout.readline()
    with (
        raises(Code.IN_USE, tmp_path / "out"),
        claimed(tmp_path / "out", OURS),
    ):
        pass
    first.stdin.close()
    first.wait()
