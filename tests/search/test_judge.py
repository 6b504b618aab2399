from pathlib import Path
from typing import Any

import pytest

from lathe.search.design import parse_goal
from lathe.search.result import judge_candidate
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.evaluation_folder import folder


@pytest.mark.parametrize(
    ("budget", "dense", "candidate", "verdict"),
    [
        ("accuracy=-2", {}, {"wrong": 1010, "rise": 3.0}, "pass"),
        ("accuracy=-2", {}, {"wrong": 1100}, "fail"),
        ("accuracy=-2", {"wrong": 1990}, {"wrong": 2000}, "inconclusive"),
        ("accuracy=-2", {"wrong": 1990, "text": False}, {"wrong": 2000, "text": False}, "inconcl"),
        ("perplexity=0.05", {}, {"wrong": 2000, "rise": 0.02}, "pass"),
        ("perplexity=0.05", {}, {"rise": 0.1}, "fail"),
    ],
)
def test_the_budget_alone_decides(
    budget: str, dense: dict[str, Any], candidate: dict[str, Any], verdict: str, tmp_path: Path
) -> None:
    """The recipe's own margins, which these candidates exceed or easily meet, do not count."""
    own = GateSettings(margins={"perplexity": 0.0, "cloze accuracy": 0.9})
    folders = folder(tmp_path / "dense", **dense), folder(tmp_path / "candidate", **candidate)
    found = judge_candidate(Recipe(Gate=own), parse_goal("bytes=0.5", budget), *folders)
    assert found.startswith(verdict)


def test_a_budget_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    folders = [folder(tmp_path / name, cloze=False) for name in ("dense", "candidate")]
    with raises(Code.UNKNOWN_NAME, "'cloze accuracy'"):
        judge_candidate(Recipe(), parse_goal("bytes=0.5", "accuracy=-2"), *folders)
