"""Progress lines in a log, and human-readable durations."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lathe_base.progress import Bar, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (45, "45 s"), (99.4, "99 s"), (100, "2 min"), (5400, "90 min"), (9000, "2.5 h")],
)
def test_a_time_has_two_digits(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("of", "line"),
    [
        (("tokenize", 400, 0), "tokenize 100/400, 9 a second, 30 s left"),
        (("step", 400, 50), "step 150/400, 9 a second, 25 s left"),  # 50 were done before
        (("read python", None, 0), "read python: 100 so far, 9 a second"),
    ],
)
def test_a_bar_tells_its_position_now_and_then(
    of: tuple[str, int | None, int], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    what, total, first = of
    bar = Bar(what, total, first=first)
    logging.getLogger("lathe").propagate = True
    with caplog.at_level("INFO", "lathe"):
        bar.advance(50, "9 a second")
        bar._started -= 10
        bar._logged -= 10
        bar.advance(50, "9 a second")
    assert set(caplog.messages) == {line}


@pytest.mark.slow
def test_bars_of_other_libraries_stay_out_of_a_log(tmp_path: Path) -> None:
    code = """
from lathe_base.console import log_to_stderr
log_to_stderr()
import datasets, huggingface_hub.utils, tqdm, tqdm.auto
datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(DATA)
for track in (tqdm.tqdm, tqdm.auto.tqdm, huggingface_hub.utils.tqdm):
    list(track(range(2)))
"""
    variables = {k: v for k, v in os.environ.items() if "TQDM" not in k and "PROGRESS" not in k}
    command = [sys.executable, "-c", code.replace("DATA", repr(str(tmp_path / "data")))]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    asked = subprocess.run(
        command, env=variables | {"TQDM_DISABLE": ""}, capture_output=True, text=True, check=True
    )
    assert "2/2" in asked.stderr
