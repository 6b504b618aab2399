"""The runner of tests in forks, `tests.support.forks`."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, pathlib
FLAG = pathlib.Path(__file__).with_name("flag")

def test_unstable():
    seen = FLAG.exists()
    FLAG.touch()
    assert seen, "the first time"

def test_broken():
    assert not FLAG

def test_crash():
    os.abort()

def test_after():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", ["1", "500"])
def test_what_fails_runs_again_alone(early: str, tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        folder = tmp_path / name[:-3]
        folder.mkdir()
        (folder / name).write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.forks", "--forks", "2"]
    command += ["--early", early]
    found = subprocess.run(
        [*command, "-c", "/dev/null", f"--rootdir={tmp_path}", tmp_path],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert found.returncode == 1
    assert "4 failed, 4 passed" in found.stdout
    repeated, _, summary = found.stdout.partition("short test summary")
    assert all(f"{name}::test_unstable (call)" in repeated for name in ("test_a.py", "test_b.py"))
    assert "the first time" in repeated and "test_unstable" not in summary
    assert summary.count("::test_broken") == summary.count("::test_crash") == 2
