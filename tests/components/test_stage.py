"""The work of components before and after their stage."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from kfp import dsl

from components.artifacts import FIGURES, record, run_usage
from components.stage import stage
from lathe_base.errors import Code, UserError
from lathe_base.storage import write_text
from lathe_launch.usage import GPU_HOUR, Usage


@pytest.fixture(autouse=True)
def lathe_logger():
    log = logging.getLogger("lathe")
    before = log.handlers, log.propagate, log.level
    yield log
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def test_yields_the_recipe_with_overrides_and_marks_the_log(capsys, lathe_logger):
    with stage("tiny", ["Engine.max_steps=7"]) as recipe:
        lathe_logger.info("one\ntwo")
    assert recipe.Engine.max_steps == 7
    assert capsys.readouterr().out == "[lathe] one\n[lathe] two\n"


def test_a_users_mistake_is_a_message_and_status_2(capsys):
    with pytest.raises(SystemExit) as ended, stage("tiny", []):
        raise UserError("corpus.txt: empty", "give a file with text", Code.TOO_LITTLE_DATA)
    assert ended.value.code == 2
    out = capsys.readouterr().out
    mark = "[lathe] error[too-little-data]: "
    assert out == f"{mark}corpus.txt: empty\n{mark}  hint: give a file with text\n"


def test_so_is_a_wrong_recipe(capsys):
    with pytest.raises(SystemExit), stage("tiny", ["Engine.max_step=7"]):
        pytest.fail("the stage must not start")
    assert "Engine.max_steps" in capsys.readouterr().out


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), stage("tiny", []):
        _ = 1 / 0


def test_record_writes_the_finite_numbers_and_what_the_step_has_used(tmp_path, capsys):
    @dataclass
    class Result:
        folder: Path
        loss: float
        passed: bool
        perplexity: float | None = None
        ratio: float = float("inf")

    metrics = dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"))
    model = dsl.Model(name="model", uri=str(tmp_path / "model"))
    record(Result(tmp_path, 2.5, True), metrics, model)
    figures = {"loss": 2.5, "passed": 1.0}
    assert model.metadata == figures  # those of the model: they are part of cache keys
    used = Usage.of_figures(metrics.metadata)
    assert metrics.metadata == figures | used.figures
    assert used.hours > 0 and used.cpu_hours > 0 and used.peak_memory_gib > 0.05
    assert json.loads(Path(metrics.path).read_text()) == metrics.metadata
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line.removeprefix(FIGURES)) == metrics.metadata


def test_what_workers_elsewhere_have_used_is_added(tmp_path, monkeypatch):
    monkeypatch.setenv(GPU_HOUR, "2.5")
    workers = Usage(gpu_hours=16.0, cpu_hours=30.0, peak_memory_gib=24.0, waited_seconds=60.0)
    metrics = dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"))
    model = dsl.Model(name="model", uri=str(tmp_path / "model"))
    record({"loss": 2.5} | workers.figures, metrics, model)
    used = Usage.of_figures(metrics.metadata)
    assert used.gpu_hours == 16.0 and used.peak_memory_gib == 24.0 and used.waited_seconds == 60.0
    assert used.price == 40.0 and 30.0 < used.cpu_hours < 30.1 and used.hours < 1.0
    assert model.metadata == {"loss": 2.5}


USED = Usage(hours=1.0, gpu_hours=8.0, peak_memory_gib=3.0)
RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"


def test_a_report_finds_what_the_steps_of_its_local_run_have_used(tmp_path):
    """The latest time that each was done, whichever start of the run's folder that was."""
    for number, (start, place, used) in enumerate((
        ("2026-11-27-18-03-10-504809", "prepare", USED + USED),
        ("2026-11-27-19-03-10-504809", "prepare", USED),
        ("2026-11-27-18-03-10-504809", "for-loop-1-iteration-0/tokenize", USED),
        ("2026-11-27-18-03-10-504809", "for-loop-1-iteration-1/tokenize", USED),
    )):  # fmt: skip
        folder = tmp_path / f"full-{start}" / place
        folder.mkdir(parents=True)
        (folder / "metrics").write_text(json.dumps({"tokens": 5} | used.figures))
        os.utime(folder / "metrics", (number, number))
    page = tmp_path / "full-2026-11-27-19-03-10-504809" / "report" / "page"
    assert run_usage(dsl.HTML(name="page", uri=str(page))) == {
        "prepare": USED,
        "tokenize": USED + USED,
    }
    assert run_usage(dsl.HTML(name="page", uri=str(tmp_path / "a" / "b" / "page"))) == {}


def test_a_report_finds_what_the_steps_of_its_run_on_a_cluster_have_used(s3, monkeypatch, caplog):
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    place = f"{s3}/full/{RUN}"
    write_text(f"{place}/pretrain/{RUN}/metrics", json.dumps({"loss": 1.0} | USED.figures))
    write_text(f"{s3}/full/another/prune/{RUN}/metrics", json.dumps(USED.figures))
    page = dsl.HTML(name="page", uri=f"{place}/report/{RUN}/page")
    assert run_usage(page) == {"pretrain": USED}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert run_usage(page) == {} and "does not show what the steps have used" in caplog.text
