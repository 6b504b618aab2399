"""Progress lines in a log, and human-readable durations."""

import logging

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
