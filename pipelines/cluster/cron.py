"""Kubeflow's cron expressions, which have six fields starting with seconds, and their times.

The parser is our own because it has to accept exactly what Kubeflow's scheduler does: croniter also
accepts `L`, `W` and `#`, which that scheduler does not know.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from lathe_base.errors import Code, UserError

MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
FIELDS: list[tuple[str, int, int, list[str]]] = [
    ("second", 0, 59, []),
    ("minute", 0, 59, []),
    ("hour", 0, 23, []),
    ("day of month", 1, 31, []),
    ("month", 1, 12, MONTHS),
    ("day of week", 0, 6, WEEKDAYS),
]
HINT = (
    'write "SECOND MINUTE HOUR DAY-OF-MONTH MONTH DAY-OF-WEEK": '
    '"0 0 3 * * 1" is Mondays at 03:00:00'
)
MAX_TIME_TO_MATCH = timedelta(days=8 * 366)
"""Maximum time to the next match: February 29th may be eight years away."""


@dataclass(frozen=True)
class Cron:
    """The values that each field allows.

    If both day fields are restricted, either may match, as in every cron.
    """

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day_is_enough: bool

    def after(self, start: datetime) -> Iterator[datetime]:
        """Yield the matching times after `start`, in its time zone."""
        midnight = start.replace(hour=0, minute=0, second=0, microsecond=0)
        for number in range(MAX_TIME_TO_MATCH.days):
            day = midnight + timedelta(days=number)
            # A week of cron begins with Sunday, 0; one of ISO ends with it, 7.
            of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
            on = of_month or of_week if self.any_day_is_enough else of_month and of_week
            if not on or day.month not in self.months:
                continue
            for hour in sorted(self.hours):
                for minute in sorted(self.minutes):
                    for second in sorted(self.seconds):
                        time = day.replace(hour=hour, minute=minute, second=second)
                        if time > start:
                            yield time


def parse_cron(text: str) -> Cron:
    """Read a cron expression with the grammar of Kubeflow's scheduler.

    Raises:
        UserError: not six fields (a crontab has five, without seconds), a value out of range, or a
            date that does not exist.
    """
    parts = text.split()
    if len(parts) == 5:
        raise UserError(
            f"cron {text!r}: has five fields, but Kubeflow's cron has six, seconds first",
            f'put a 0 before it: "0 {text.strip()}"',
            Code.INVALID_VALUE,
        )
    if len(parts) != len(FIELDS):
        raise UserError(
            f"cron {text!r}: {len(parts)} fields instead of six", HINT, Code.INVALID_VALUE
        )
    second, minute, hour, day, month, weekday = (
        _values(text, part, *field) for part, field in zip(parts, FIELDS, strict=True)
    )
    free = [part[0] in "*?" for part in (parts[3], parts[5])]
    cron = Cron(second, minute, hour, day, month, weekday, any_day_is_enough=not any(free))
    if not any(True for _ in cron.after(datetime(2024, 1, 1, tzinfo=UTC))):
        raise UserError(f"cron {text!r}: this date does not exist", HINT, Code.INVALID_VALUE)
    return cron


def _values(
    text: str, field: str, name: str, low: int, high: int, names: list[str]
) -> frozenset[int]:
    """The values of a comma-separated list of `*`, `3`, `1-5`, `*/15`, `3/15` or `MON-FRI`."""
    values: set[int] = set()
    for item in field.upper().split(","):
        match = re.fullmatch(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?", item)
        if not match or (match[1] in "*?" and match[2]):
            raise UserError(
                f"cron {text!r}: {name}: {item!r} is not valid", HINT, Code.INVALID_VALUE
            )
        first, last, step = match.groups()
        begin: int | None = low
        end: int | None = high
        if first not in "*?":
            begin = _number(first, low, names)
            # 3/15 is 3-59/15.
            end = _number(last, low, names) if last else high if step else begin
        if begin is None or end is None or not low <= begin <= end <= high or step == "0":
            known = f", or {names[0]} to {names[-1]}" if names else ""
            raise UserError(
                f"cron {text!r}: {name}: {item!r} is not in {low}-{high}{known}",
                HINT,
                Code.INVALID_VALUE,
            )
        values.update(range(begin, end + 1, int(step or 1)))
    return frozenset(values)


def _number(text: str, low: int, names: list[str]) -> int | None:
    if text in names:
        return low + names.index(text)
    return int(text) if text.isdecimal() else None
