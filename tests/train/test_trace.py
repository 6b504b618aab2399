"""A run's trace and logs during training, across a kill and a resume."""

import json
import logging
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lathe.train.batches import Batch
from lathe.train.trace import StepRecord, Trace
from lathe_base.progress import Bar
from tests.support import warm

TRAIN = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")
VALIDATION = ("loss", "perplexity")


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "loss": 11.052017212,
        "lr": 5.55556e-09,
        "grad_norm": 2.5,
        "tokens_per_second": 5132.0,
        "step_seconds": 1.59627,
        "reader_seconds": 0.0571,
        "mfu": 0.4123,
        "loss_scale": 1.0,
    }
    skipped = int(changes.pop("skipped_steps", 0))
    return StepRecord(step=step, skipped_steps=skipped, **(values | changes))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Log messages."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: logged.append(r.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lathe")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logged
    logger.removeHandler(handler)
    logger.setLevel(before)


def open_trace(folder: Path, step: int = 0, data_parallel: int = 1, logging_freq: int = 1) -> Trace:
    return Trace(folder, step, Batch(8 * data_parallel, 8, 8, 1), 12, logging_freq)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar, as displayed by TensorBoard."""
    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {t: [(e.step, e.value) for e in read.Scalars(t)] for t in read.Tags()["scalars"]}


def jsonl(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def log_file(folder: Path) -> list[str]:
    return (folder / "steps.log").read_text().splitlines()


def test_the_log_file_has_the_line_of_paddlefleetx(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    trace.step(record(1, mfu=None), Bar("step", 2))
    trace.close()
    assert log_file(tmp_path) == [
        "global step 1, epoch: 0, batch: 0, loss: 11.052017212, avg_reader_cost: 0.05710 sec, "
        "avg_batch_cost: 1.59627 sec, speed: 0.63 step/s, ips_total: 5132 tokens/s, "
        "ips: 5132 tokens/s, learning rate: 5.55556e-09"
    ]


def test_the_loss_scale_is_logged_with_float16(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    trace.step(record(1, loss_scale=32768.0), Bar("step", 3))
    trace.step(record(2, loss_scale=2.0**24, skipped_steps=3), Bar("step", 3))
    trace.step(record(3, loss_scale=0.25, skipped_steps=3), Bar("step", 3))
    trace.close()
    lines = log_file(tmp_path)
    assert lines[0].endswith(", mfu: 0.412, loss_scale: 32768, skipped: 0")
    assert lines[1].endswith(", loss_scale: 16777216, skipped: 3")
    assert lines[2].endswith(", loss_scale: 0.25, skipped: 3")


def test_the_tokens_seen_of_each_part_of_a_blend_are_logged(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    trace.step(record(1, seen_tokens={"1-novels": 750, "2-code": 250}), Bar("step", 3))
    trace.close()
    assert log_file(tmp_path)[0].endswith(", seen_tokens: 1-novels 750, 2-code 250")
    assert jsonl(tmp_path)[0]["seen_tokens"] == {"1-novels": 750, "2-code": 250}
    assert events(tmp_path)["train/seen_tokens/2-code"] == [(1, 250.0)]


def test_a_line_averages_the_steps_since_the_last_one(tmp_path: Path) -> None:
    """1000 tokens in 1 s and in 3 s are 500 tokens/s, and MFU is averaged the same way."""
    trace, progress = open_trace(tmp_path, data_parallel=2, logging_freq=2), Bar("step", 4)
    fast = {"step_seconds": 1.0, "tokens_per_second": 1000.0, "mfu": 0.3, "reader_seconds": 0.0}
    slow = {"step_seconds": 3.0, "tokens_per_second": 1000 / 3, "mfu": 0.1, "reader_seconds": 0.5}
    for step, changes in enumerate((slow, slow, fast, slow), start=1):
        trace.step(record(step, **changes), progress)
    trace.close()
    lines = log_file(tmp_path)
    assert len(lines) == 2 and progress.done == 4
    assert lines[1].startswith(
        "global step 4, epoch: 4, batch: 3, "
    )  # 3 * 16 of 12 samples per epoch
    assert "avg_reader_cost: 0.25000 sec, avg_batch_cost: 2.00000 sec" in lines[1]
    assert "ips_total: 500 tokens/s, ips: 250 tokens/s" in lines[1]
    assert lines[1].endswith(", mfu: 0.150")


def test_a_reader_gets_short_lines_with_the_time_left(tmp_path: Path, lines: list[str]) -> None:
    """MFU is shown only if the device's peak is known."""
    trace, progress = open_trace(tmp_path, step=2, logging_freq=2), Bar("step", 9, first=2)
    for step in (3, 4):
        progress._started -= 50
        trace.step(record(step, mfu=None), progress)
    progress._started -= 80
    trace.step(record(5, mfu=0.4), progress)
    trace.step(record(6, mfu=0.4), progress)
    trace.close()
    assert lines == [
        "step 4/9, loss 11.052, 5,132 tokens/s, 4 min left",
        "step 6/9, loss 11.052, 5,132 tokens/s, MFU 40%, 2 min left",
    ]


def test_a_terminal_shows_a_bar_and_no_line(tmp_path: Path, lines: list[str]) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with Progress(TextColumn("{task.description} {task.fields[status]}"), console=console) as shown:
        trace = open_trace(tmp_path)
        trace.step(record(1, mfu=None), Bar("step", 9, shown))
        trace.close()
        assert shown.tasks[0].fields["status"] == "loss 11.052, 5,132 tokens/s"
    assert lines == [] and len(log_file(tmp_path)) == 1


def test_train_jsonl_has_every_field_of_every_step(tmp_path: Path) -> None:
    trace = open_trace(tmp_path, logging_freq=10)
    steps = [record(1), record(2, loss_scale=512.0, skipped_steps=1)]
    for step in steps:
        trace.step(step, Bar("step", 2))
    trace.evaluation(2, math.log(20), {})
    trace.close()
    evaluation = {"step": 2, "eval_loss": math.log(20), "eval_perplexity": pytest.approx(20)}
    assert jsonl(tmp_path) == [*map(asdict, steps), evaluation]


def test_tensorboard_reads_the_scalars_during_the_run(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    trace.step(record(1), Bar("step", 2))
    trace.evaluation(1, 3.0, {})
    seen = events(tmp_path)
    trace.close()
    assert set(seen) == {f"train/{n}" for n in TRAIN} | {f"validation/{n}" for n in VALIDATION}
    expected = {"loss": 11.052017212, "learning_rate": 5.55556e-09, "grad_norm": 2.5, "mfu": 0.4123}
    for name, value in expected.items():
        assert seen[f"train/{name}"] == [(1, pytest.approx(value))]
    assert seen["validation/perplexity"] == [(1, pytest.approx(math.exp(3)))]


def attempt(folder: Path, start: int, end: int, loss: float) -> None:
    """Train from step `start` to `end`, evaluating before the first and at every third step, then
    leave truncated files as a kill would."""
    trace, progress = open_trace(folder, start), Bar("step", end)
    if start == 0:
        trace.evaluation(0, loss, {})
    for step in range(start + 1, end + 1):
        trace.step(record(step, loss=loss), progress)
        if step % 3 == 0:
            trace.evaluation(step, loss, {})
    trace.close()
    for name, half in (("train.jsonl", '{"step": 1, "lo'), ("steps.log", "global step 1")):
        with (folder / name).open("a") as file:
            file.write(half)
    time.sleep(1)  # event files are ordered by the seconds in their names


@pytest.mark.slow
def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 4, loss=9.0)  # nothing saved yet
    attempt(tmp_path, 0, 8, loss=3.0)  # saved at step 6
    attempt(tmp_path, 6, 9, loss=2.0)
    steps = [(step, 3.0 if step <= 6 else 2.0) for step in range(1, 10)]
    evaluations = [(0, 3.0), (3, 3.0), (6, 3.0), (9, 2.0)]
    seen = events(tmp_path)
    assert seen["train/loss"] == steps
    assert seen["validation/loss"] == evaluations
    with pytest.raises(json.JSONDecodeError):
        jsonl(tmp_path)  # truncated line from the last kill
    open_trace(tmp_path, step=9).close()
    written = jsonl(tmp_path)
    assert [(r["step"], r["loss"]) for r in written if "loss" in r] == steps
    logged = [line.split(",")[0] for line in log_file(tmp_path)]
    assert logged == [f"global step {step}" for step in range(1, 10)]
    assert [(r["step"], r["eval_loss"]) for r in written if "eval_loss" in r] == evaluations


def test_tensorboard_comes_with_the_first_trace_and_says_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from lathe.train.batches import Batch\n"
        "from lathe.train.trace import Trace\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"Trace(Path({str(tmp_path)!r}), 0, Batch(8, 8, 8, 1), 12, 1).close()\n"
    )
    done = subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
