"""Every promise in docs/safety.md names existing tests that verify it."""

import re
from pathlib import Path

import pytest

from tests.hostile.table import CASES

ROOT = Path(__file__).resolve().parents[2]
SAFETY = (ROOT / "docs/safety.md").read_text()
NAMED = re.findall(r"`(tests/\S+\.py)(?:::(\w+))?`", SAFETY)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_promise_has_its_test(file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {test}\(", text, re.M) if test else "\ndef test_" in text


def test_every_promise_names_one() -> None:
    rows = [line for line in SAFETY.splitlines() if "|" in line]
    promises = [row for row in rows if not re.match(r"\| ?(Guarantee|-)|\|-", row)]
    assert promises and all("`tests/" in row for row in promises)


def test_there_are_about_as_many_hostile_situations_as_it_says() -> None:
    said = int(re.findall(r"about ([\d,]+) hostile", SAFETY)[0].replace(",", ""))
    assert len(CASES) == pytest.approx(said, rel=0.1)
