"""Runs that are killed, preempted or moved to another layout resume where they stopped."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from lathe.data.prepare import prepare
from lathe.train.pretrain import pretrain
from lathe.train.state_folder import committed_steps
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code, Preempted, StageError
from tests.support.errors import raises
from tests.support.small_run import SMALL, kill_after_saves, records, run, start, worker_pids

DROPOUT = ("Model.hidden_dropout_prob=0.1", "Model.attention_probs_dropout_prob=0.1")
TWO = (*DROPOUT, "Global.local_batch_size=4", "Engine.save_load.save_steps=3")


def assert_same_bits(run: Path, other: Path) -> None:
    for key in ("loss", "eval_loss", "lr", "grad_norm"):
        assert records(run, key) == records(other, key)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, other))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def wait_for_steps(process: subprocess.Popen[bytes], output: Path, steps: int) -> None:
    trace, deadline = output / "train.jsonl", time.monotonic() + 180
    while not trace.exists() or trace.read_text().count('"loss"') < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run with dropout, for comparison."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run("pretrain", small_data, output, overrides=DROPOUT)
    return output


def test_killed_run_resumes_bit_identically(small_data: Path, tmp_path: Path, whole: Path) -> None:
    killed = tmp_path / "killed"
    for saves in (1, 2):
        kill_after_saves(start("pretrain", small_data, killed, overrides=DROPOUT), killed, saves)
    run("pretrain", small_data, killed, overrides=DROPOUT)
    assert_same_bits(killed, whole)


@pytest.mark.slow
def test_a_killed_run_on_sentences_resumes_bit_identically(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [f"{i} bottles. On wall {i * 7}. {'Take one! ' * (i % 5)}\n\n" for i in range(2000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    recipe = load_recipe("tiny", (*SMALL, "Prepare.split_sentences=true"))
    text, tokenizer = str(tmp_path / "corpus.txt"), str(tmp_path / "tokenizer.json")
    data = prepare(recipe, tmp_path / "data", text, tokenizer).folder
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("pretrain", data, whole)
    kill_after_saves(start("pretrain", data, killed), killed, 2)
    run("pretrain", data, killed)
    assert_same_bits(killed, whole)


LONGER = (*DROPOUT, "Engine.max_steps=25", "Optimizer.lr.decay_steps=30")
KEPT = (*LONGER, "Engine.max_steps=15", "Engine.save_load.keep_final=true")


@pytest.mark.slow
def test_more_steps_extend_a_run_bit_identically(
    small_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One epoch suffices for both lengths."""
    whole, extended, killed = (tmp_path / name for name in ("whole", "extended", "killed"))
    run("pretrain", small_data, whole, overrides=LONGER)
    run("pretrain", small_data, extended, overrides=KEPT)
    assert [path.name for path in committed_steps(extended / "state")] == ["step_00000015"]
    run("pretrain", small_data, extended, overrides=LONGER)
    assert "extended from 15 to 25 steps" in caplog.text
    rates = "0.00126 at step 15, and 0.000348 at step 25"  # a cosine from step 3 to 30
    assert f"decay_steps=30, the learning rate is {rates}" in caplog.text
    kill_after_saves(start("pretrain", small_data, killed, overrides=KEPT), killed, 1)
    run("pretrain", small_data, killed, overrides=LONGER)
    for output in (extended, killed):
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, whole))
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
        assert records(output, "loss") == records(whole, "loss")
        assert not (output / "state").exists()


def test_a_schedule_that_follows_the_steps_is_longer_too(
    small_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ("Engine.max_steps=4", "Engine.save_load.keep_final=true")
    run("pretrain", small_data, tmp_path / "run", overrides=short)
    run("pretrain", small_data, tmp_path / "run", overrides=("Engine.max_steps=6",))
    says = "decay_steps=6, before 4, the learning rate is 0.000744 rather than 0.0002 at step 4"
    assert says in caplog.text
    assert records(tmp_path / "run", "lr")[4] == pytest.approx(3.48e-4, rel=0.01)


def test_a_finished_run_without_its_state_cannot_be_extended(
    small_data: Path, tmp_path: Path
) -> None:
    run("pretrain", small_data, tmp_path / "run", overrides=("Engine.max_steps=2",))
    before = (tmp_path / "run/lathe.json").read_bytes()
    with raises(Code.INCOMPLETE, tmp_path / "run", "2 steps"):
        run("pretrain", small_data, tmp_path / "run", overrides=("Engine.max_steps=3",))
    assert (tmp_path / "run/lathe.json").read_bytes() == before


@pytest.mark.slow
def test_a_killed_rank_loses_nothing(small_data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("pretrain", small_data, whole, overrides=TWO, workers=2)
    launcher = start("pretrain", small_data, killed, overrides=TWO, workers=2)
    wait_for_steps(launcher, killed, 5)
    os.kill(worker_pids(launcher)[-1], signal.SIGKILL)
    launcher.communicate()
    assert launcher.returncode != 0 and not (killed / "lathe.json").exists()
    run("pretrain", small_data, killed, overrides=TWO, workers=2)
    assert_same_bits(killed, whole)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["Distributed.dp_degree=2", "Distributed.pp_degree=2"])
def test_twenty_kills_at_random_moments(layout: str, small_data: Path, tmp_path: Path) -> None:
    """Kills one rank or all, during a step, during a save or in between."""
    overrides = (
        *DROPOUT,
        layout,
        "Global.global_batch_size=8",
        "Global.local_batch_size=",
        "Engine.max_steps=800",
        "Engine.eval_freq=100",
        "Engine.save_load.save_steps=3",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("pretrain", small_data, whole, overrides=overrides, workers=2)
    chance = random.Random(layout)
    kills = 0
    for _ in range(20):
        launcher = start("pretrain", small_data, killed, overrides=overrides, workers=2)
        before = (
            len(committed_steps(killed / "state")) and committed_steps(killed / "state")[-1].name
        )
        in_a_save = chance.random() < 0.4
        while launcher.poll() is None:  # until it has made progress
            states = committed_steps(killed / "state")
            if states and states[-1].name != before:
                break
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        while in_a_save and launcher.poll() is None:
            if list((killed / "state").glob("*.partial/*")):
                break
        workers = worker_pids(launcher)
        for pid in workers if chance.random() < 0.5 else workers[-1:]:
            os.kill(pid, signal.SIGKILL)
            kills += 1
        launcher.communicate()
        assert launcher.returncode != 0
    assert kills >= 20
    run("pretrain", small_data, killed, overrides=overrides, workers=2)
    assert_same_bits(killed, whole)


@pytest.mark.slow
def test_preempted_run_saves_and_resumes_bit_identically(small_data: Path, tmp_path: Path) -> None:
    rare = (*DROPOUT, "Engine.save_load.save_steps=1000", "Engine.max_steps=60")
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    run("pretrain", small_data, whole, overrides=rare)
    process = start("pretrain", small_data, ended, overrides=rare)
    wait_for_steps(process, ended, 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == Preempted.status == 75
    assert "run the same command to resume" in errors.decode()
    (state,) = committed_steps(ended / "state")
    assert int(state.name.removeprefix("step_")) == len(records(ended, "loss"))
    run("pretrain", small_data, ended, overrides=rare)
    assert_same_bits(ended, whole)


@pytest.mark.slow
def test_preempted_workers_end_with_its_status(small_data: Path, tmp_path: Path) -> None:
    """Runs the command line, which starts its workers."""
    output = tmp_path / "run"
    overrides = [*SMALL, "Distributed.dp_degree=2", "Engine.max_steps=100000"]
    options = [part for override in overrides for part in ("-o", override)]
    lathe = [sys.executable, "-m", "lathe"]
    process = subprocess.Popen(
        [*lathe, "pretrain", "--data", small_data, "--output", output, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    wait_for_steps(process, output, 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors.decode()
    assert errors.decode().splitlines()[-1].startswith("preempted: saved at step")
    assert committed_steps(output / "state")


@pytest.mark.slow
def test_a_run_moves_to_other_processes(small_data: Path, tmp_path: Path) -> None:
    """Each resumes from the previous state: 1, 2, 2, 1 and 2 processes in five layouts."""
    base = (*SMALL, "Global.global_batch_size=8", "Global.local_batch_size=")
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    pretrain(load_recipe("tiny", base), small_data, whole)
    layouts = (
        (1, ()),
        (2, ("Distributed.dp_degree=2",)),
        (2, ("Distributed.mp_degree=2", "Model.sequence_parallel=True")),
        (1, ("Engine.accumulate_steps=2",)),
        (2, ("Distributed.pp_degree=2",)),
    )
    for number, (workers, layout) in enumerate(layouts[:-1], 1):
        process = start("pretrain", small_data, moved, overrides=(*base, *layout), workers=workers)
        kill_after_saves(process, moved, min(2, number), newer_than=(number - 1) * 4)
    run("pretrain", small_data, moved, overrides=(*base, *layouts[-1][1]), workers=2)
    for key in ("loss", "eval_loss", "grad_norm"):
        np.testing.assert_allclose(records(moved, key), records(whole, key), atol=1e-4)


def truncate(state: Path) -> None:
    shard = next(state.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(path: Path, position: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def flip_a_weight(state: Path) -> None:
    flip(next(state.glob("*.safetensors")), -3, 0x40)


def flip_a_digit(state: Path) -> None:
    metadata = state / "trainer.json"
    number = re.search(r'"updates": \d+', metadata.read_text())
    assert number
    flip(metadata, number.end() - 1, 1)


@pytest.fixture(scope="module")
def two_states(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after two saves."""
    killed = tmp_path_factory.mktemp("two_states") / "run"
    kill_after_saves(start("pretrain", small_data, killed, overrides=DROPOUT), killed, 2)
    return killed


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "not the size that trainer.json lists"),
        (flip_a_weight, "not the SHA-256 that trainer.json lists"),
        pytest.param(
            *(flip_a_digit, "trainer.json differs from its SHA-256"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_corrupt_state_means_the_one_before_it(
    two_states: Path,
    spoil: Callable[[Path], None],
    reason: str,
    small_data: Path,
    tmp_path: Path,
    whole: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(two_states, tmp_path / "run")
    before, newest = committed_steps(tmp_path / "run/state")
    spoil(newest)
    run("pretrain", small_data, tmp_path / "run", overrides=DROPOUT)
    (warning,) = [r.message for r in caplog.records if "corrupt checkpoint" in r.message]
    assert f"{newest} (" in warning and reason in warning
    assert warning.endswith(f"resuming from {before}")
    assert_same_bits(tmp_path / "run", whole)


def test_a_run_whose_states_are_all_corrupt_does_not_start_over(
    two_states: Path, small_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_states, tmp_path / "run")
    states = committed_steps(tmp_path / "run/state")
    for state in states:
        flip_a_weight(state)
    with raises(Code.CORRUPT, *states, f"delete {tmp_path}/run/state"):
        run("pretrain", small_data, tmp_path / "run", overrides=DROPOUT)
    assert committed_steps(tmp_path / "run/state") == states


def test_a_state_of_an_earlier_version_is_resumed_by_its_sizes(
    two_states: Path, small_data: Path, tmp_path: Path, whole: Path
) -> None:
    shutil.copytree(two_states, tmp_path / "run")
    for state in committed_steps(tmp_path / "run/state"):
        values = json.loads((state / "trainer.json").read_text())
        del values["sha256"], values["metadata_sha256"]
        (state / "trainer.json").write_text(json.dumps(values))
    run("pretrain", small_data, tmp_path / "run", overrides=DROPOUT)
    assert_same_bits(tmp_path / "run", whole)


@pytest.mark.slow
def test_all_ranks_skip_a_corrupt_state(small_data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("pretrain", small_data, whole, overrides=TWO, workers=2)
    kill_after_saves(start("pretrain", small_data, killed, overrides=TWO, workers=2), killed, 2)
    flip_a_weight(committed_steps(killed / "state")[-1])
    run("pretrain", small_data, killed, overrides=TWO, workers=2)
    assert_same_bits(killed, whole)


def test_a_save_that_fails_names_the_folder_and_the_hint(small_data: Path, tmp_path: Path) -> None:
    """Limits files to 100 kB, as on a full disk; the state is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with raises(Code.IO, "step_00000004", "hint", kind=StageError):
            pretrain(load_recipe("tiny", SMALL), small_data, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not committed_steps(tmp_path / "run" / "state")
    resumed = pretrain(load_recipe("tiny", SMALL), small_data, tmp_path / "run")
    assert resumed.step == 20


def test_the_newest_states_are_kept(small_data: Path, tmp_path: Path) -> None:
    keep = ("Engine.save_load.keep=3", "Engine.save_load.save_steps=2", "Engine.max_steps=200")
    process = start("pretrain", small_data, tmp_path / "run", overrides=keep)
    kill_after_saves(process, tmp_path / "run", 3, newer_than=8)
    assert 3 <= len(committed_steps(tmp_path / "run" / "state")) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_state_is_saved_by_the_clock_too(
    small_data: Path, tmp_path: Path, workers: int
) -> None:
    clock = ("Engine.save_load.save_steps=1000", "Engine.save_load.save_minutes=0.005")
    settings = (*clock, "Engine.max_steps=100000")
    process = start("pretrain", small_data, tmp_path / "run", overrides=settings, workers=workers)
    kill_after_saves(process, tmp_path / "run", 2, newer_than=2)
    saved = [int(s.name.removeprefix("step_")) for s in committed_steps(tmp_path / "run" / "state")]
    assert saved and all(0 < step < 1000 for step in saved)
