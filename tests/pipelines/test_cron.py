"""Six-field cron expressions and their times."""

from datetime import UTC, datetime
from itertools import islice

import pytest

from lathe_base.errors import Code
from pipelines.cluster.schedule import parse_cron
from tests.support.errors import raises

START = datetime(2026, 1, 30, 12, 0, 0, tzinfo=UTC)  # a Friday


@pytest.mark.parametrize(
    ("cron", "times"),
    [
        ("0 0 3 * * 1", ["02-02 03:00:00", "02-09 03:00:00", "02-16 03:00:00"]),
        ("0 0 3 * * MON", ["02-02 03:00:00", "02-09 03:00:00", "02-16 03:00:00"]),
        ("30 */20 * * * *", ["01-30 12:00:30", "01-30 12:20:30", "01-30 12:40:30"]),
        ("0 0 0 31 * ?", ["01-31 00:00:00", "03-31 00:00:00", "05-31 00:00:00"]),
        ("0 0 12 * * *", ["01-31 12:00:00", "02-01 12:00:00", "02-02 12:00:00"]),
        ("0 5/25 23 1 feb,mar *", ["02-01 23:05:00", "02-01 23:30:00", "02-01 23:55:00"]),
        # If both days are restricted, either one matches.
        ("0 0 6 1 * FRI", ["02-01 06:00:00", "02-06 06:00:00", "02-13 06:00:00"]),
        ("0 0 8-18/5 * * 0,6", ["01-31 08:00:00", "01-31 13:00:00", "01-31 18:00:00"]),
    ],
)
def test_next_times(cron, times):
    found = islice(parse_cron(cron).after(START), 3)
    assert [f"{time:%m-%d %H:%M:%S}" for time in found] == times


def test_a_leap_day_may_be_far():
    (time,) = islice(parse_cron("0 0 0 29 2 *").after(START), 1)
    assert time == datetime(2028, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "message"),
    [
        ("", "0 fields"),
        ("0 0 3 * * 1 2026", "7 fields"),
        ("60 0 3 * * 1", "second: '60' is not in 0-59"),
        ("0 0 3 0 * *", "day of month: '0' is not in 1-31"),
        ("0 0 3 * * 7", "day of week: '7' is not in 0-6, or SUN to SAT"),
        ("0 0 3 * XYZ *", "month: 'XYZ' is not in 1-12, or JAN to DEC"),
        ("0 0 5-3 * * *", "hour: '5-3'"),
        ("0 */0 3 * * *", "minute: '*/0'"),
        ("0 0 3 L * *", "day of month: 'L'"),
        ("0 0 3 1,,2 * *", "day of month: ''"),
        ("0 0 3 *-5 * *", "day of month: '*-5'"),
        ("0 0 3 30 2 *", ""),
    ],
)
def test_invalid_schedules_are_reported(cron, message):
    with raises(Code.INVALID_VALUE, repr(cron), message):
        parse_cron(cron)
