"""Alpha spending when the gate is repeated on the same data."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from lathe.evaluate.comparison import judge
from lathe.evaluate.gate import confidence_at, gate, spend
from lathe.evaluate.intervals import accuracy_difference
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code
from lathe_base.storage import locked
from tests.support.errors import raises
from tests.support.lm_eval import questions, write_run


def test_the_levels_of_all_looks_sum_to_that_of_one() -> None:
    levels = np.array([(1 - confidence_at(k, 0.95)) / 2 for k in range(1, 1001)])
    assert levels[0] == pytest.approx(0.0125) and (np.diff(levels) < 0).all()
    assert levels.sum() == pytest.approx(0.025, rel=2e-3) and levels.sum() < 0.025


@pytest.mark.parametrize("where", ["looks.json", "file://{}/looks.json"])
def test_a_look_is_counted_once_for_each_candidate_and_live_model(
    tmp_path: Path, where: str
) -> None:
    history = where.format(tmp_path) if "{}" in where else tmp_path / where
    asked = [("live", "a"), ("live", "b"), ("live", "a"), ("other", "a"), ("live", "c")]
    assert [spend(history, *pair) for pair in asked] == [1, 2, 1, 1, 3]


def test_another_file_is_not_taken_for_a_history(tmp_path: Path) -> None:
    path = tmp_path / "looks.json"
    for content in ("{", '{"mine": 1}', '{"looks": {"live": [{"candidate": 1}]}}'):
        path.write_text(content)
        with raises(Code.MALFORMED, path):
            spend(path, "live", "a")
        assert path.read_text() == content


def test_two_processes_do_not_count_at_once(tmp_path: Path) -> None:
    with locked(tmp_path), raises(Code.IN_USE, tmp_path):
        spend(tmp_path / "looks.json", "live", "a")
    assert spend(tmp_path / "looks.json", "live", "a") == 1


def test_later_looks_need_more_confidence(tmp_path: Path) -> None:
    right = np.arange(600) % 3 > 0
    live = write_run(tmp_path / "live", {"t": questions(list(right))})
    history, results = tmp_path / "looks.json", []
    for k in range(3):
        other = right.copy()
        other[k * 40 : k * 40 + 10] = False
        candidate = write_run(tmp_path / str(k), {"t": questions(list(other))})
        results.append(gate(Recipe(), live, candidate, tmp_path / "gate.json", history))
    assert [result.look for result in results] == [1, 2, 3]
    lows = [result.checks[0].low for result in results]
    assert lows == sorted(lows, reverse=True) and lows[0] > lows[2]
    assert results[2].confidence == pytest.approx(1 - 0.05 / 12)
    assert "99.5833% interval" in results[2].reasons[-1]
    assert json.loads((tmp_path / "gate.json").read_text())["look"] == 3
    again = gate(Recipe(), live, tmp_path / "0", history=history)
    assert again.look == 1 and again.checks == results[0].checks


def test_a_sequence_that_would_let_through_what_is_not_proven_is_refused() -> None:
    with pytest.raises(ValidationError, match="sequential excludes on_inconclusive: pass"):
        GateSettings(sequential=True, on_inconclusive="pass")
    assert GateSettings(sequential=True).sequential


def false_passes(looks: int, sequential: bool, trials: int) -> float:
    """Probability that one of `looks` candidates passes, each 2 points worse than the live one."""
    random = np.random.default_rng(looks)
    n, lost, gained, passed = 400, 0.045, 0.025, np.zeros(trials, bool)
    for look in range(1, looks + 1):
        confidence = confidence_at(look, 0.95) if sequential else 0.95
        counts = random.multinomial(n, (lost, gained, 1 - lost - gained), trials)
        tables, places = np.unique(counts[:, :2], axis=0, return_inverse=True)
        intervals = [accuracy_difference(int(a), int(b), n, confidence) for a, b in tables]
        verdicts = np.array([judge(-i.high, -i.low, 0.02) == "pass" for i in intervals])
        passed |= verdicts[places]
    return float(passed.mean())


@pytest.mark.slow
def test_a_model_at_the_margin_passes_once_in_forty_looks_and_no_more_in_all_of_a_sequence() -> (
    None
):
    """By simulation, with a tolerance of three standard errors above 2.5 %."""
    trials = 2000
    most = 0.025 + 3 * np.sqrt(0.025 * 0.975 / trials)
    assert 0.01 < false_passes(1, False, trials) < most
    assert false_passes(12, True, trials) < most
    assert false_passes(12, False, trials) > 0.15
