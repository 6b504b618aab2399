"""The summary that a run prints at its end."""

import json
from pathlib import Path

import pytest

from pipelines.local.run import show


@pytest.mark.parametrize(
    ("verdict", "passed", "printed"),
    [
        ("pass", True, "gate       passed"),
        ("fail", False, "gate       failed"),
        ("inconclusive", False, "gate       NOT PROVEN"),
        ("inconclusive", True, "gate       NOT PROVEN, passed by the recipe"),
    ],
)
def test_a_run_prints_its_verdict_and_deploys_what_passed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    passed: bool,
    printed: str,
) -> None:
    (tmp_path / "run/rehearse/deployed").mkdir(parents=True)
    (tmp_path / "run/gate").mkdir()
    found = {"verdict": verdict, "passed": passed, "reasons": ["a reason"]}
    (tmp_path / "run/gate/verdict").write_text(json.dumps(found))
    link = tmp_path / "deployed"
    show(tmp_path / "run", "qat", link)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [printed, "    a reason"]
    assert link.is_symlink() == passed
    assert any(line.startswith("not deployed") for line in lines) != passed
