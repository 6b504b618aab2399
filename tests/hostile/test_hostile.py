"""Runs the table with two workers; each verb has a test that lists its failing cases."""

import pytest

from tests.hostile import pool
from tests.hostile.__main__ import describe
from tests.hostile.case import Case
from tests.hostile.pool import Worker
from tests.hostile.table import CASES, short

FINE = ("right", "skipped")


def by_verb(cases: tuple[Case, ...]) -> dict[str, list[Case]]:
    verbs: dict[str, list[Case]] = {}
    for case in cases:
        verbs.setdefault(case.verb, []).append(case)
    return verbs


SHORT = by_verb(short())
ALL = by_verb(CASES)


@pytest.mark.parametrize("verb", SHORT)
@pytest.mark.slow
def test_a_sample_of_hostile_commands(verb: str, started: list[Worker]) -> None:
    check(SHORT[verb], started)


@pytest.mark.long
@pytest.mark.parametrize("verb", ALL)
def test_all_hostile_commands(verb: str, started: list[Worker]) -> None:
    check([case for case in ALL[verb] if case.id not in {c.id for c in SHORT[verb]}], started)


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def check(cases: list[Case], started: list[Worker]) -> None:
    wrong = [v for v in pool.run(cases, started) if v.verdict not in FINE]
    if wrong:
        repeat = 'To rerun one: python -m tests.hostile --only "VERB / ROW / NAME"'
        lines = [f"{len(wrong)} of {len(cases)} cases failed", *map(describe, wrong), repeat]
        pytest.fail("\n".join(lines), pytrace=False)
