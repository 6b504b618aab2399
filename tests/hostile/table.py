"""All cases, and the sample that runs by default."""

import zlib

from tests.hostile import (
    components,
    contents,
    damage,
    damaged_metadata,
    environment,
    output_files,
    outputs,
    paths,
    recipes,
    values,
)
from tests.hostile.case import Case

TOPICS = (
    paths,
    outputs,
    output_files,
    damage,
    damaged_metadata,
    values,
    recipes,
    contents,
    environment,
)
CASES: tuple[Case, ...] = tuple(case for topic in (*TOPICS, components) for case in topic.cases())
ONE_OF = 40


def short() -> tuple[Case, ...]:
    """Sample of the cases: every 40th of each row and at least one, the same in every run."""
    rows: dict[str, list[Case]] = {}
    for case in CASES:
        rows.setdefault(case.group, []).append(case)
    return tuple(case for row in rows.values() for case in row[_start(row) :: ONE_OF])


def _start(row: list[Case]) -> int:
    """Start of the sample, at a different column in each row."""
    return zlib.crc32(row[0].group.encode()) % min(len(row), ONE_OF)
