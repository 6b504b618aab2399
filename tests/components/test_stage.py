"""The work of components before and after their stage."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from kfp import dsl

from components.artifacts import record
from components.stage import stage
from lathe_base.errors import UserError


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
        raise UserError("corpus.txt: empty", "give a file with text")
    assert ended.value.code == 2
    out = capsys.readouterr().out
    assert out == "[lathe] error: corpus.txt: empty\n[lathe] error:   hint: give a file with text\n"


def test_so_is_a_wrong_recipe(capsys):
    with pytest.raises(SystemExit), stage("tiny", ["Engine.max_step=7"]):
        pytest.fail("the stage must not start")
    assert "Engine.max_steps" in capsys.readouterr().out


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), stage("tiny", []):
        _ = 1 / 0


def test_record_writes_the_finite_numbers(tmp_path):
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
    assert metrics.metadata == model.metadata == figures
    assert json.loads(Path(metrics.path).read_text()) == figures
