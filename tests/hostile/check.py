"""Judges the outcome of a command: a verdict in one word, and the reason."""

import re
from collections.abc import Sequence

from lathe_base.errors import Preempted, Unavailable
from tests.hostile.case import SECRET, Case
from tests.hostile.child import Outcome
from tests.hostile.sandbox import Entry, added, altered, outside

SLOW_SECONDS = 15
ERROR = re.compile(r"^(?:\[lathe\] )?(?:error\[[a-z-]+\]|preempted): (?!\s*hint:)", re.MULTILINE)
Finding = tuple[str, str]


def judge(
    case: Case,
    outcome: Outcome,
    before: dict[str, Entry],
    after: dict[str, Entry],
    leaks: Sequence[str],
    complaint: str | None = None,
) -> Finding:
    """Return the most serious verdict that applies, and its reason."""
    finding = (
        _destroyed(case, outcome, before, after)
        or (("destroyed", complaint) if complaint else None)
        or _leaked(outcome, leaks)
        or _slow(outcome)
        or _broken(outcome)
    )
    if finding:
        return finding
    done = outcome.status == 0
    if done and case.expect == "refused":
        return "accepted", "status 0"
    if not done and case.expect == "works":
        return "failed", f"status {outcome.status}"
    left = added(before, after)
    if left := (outside(left, _paths(case.writes)) if done else left):
        return "leftover", ", ".join(left[:4])
    return ("right", "") if done else _message(case, outcome)


def _destroyed(
    case: Case, outcome: Outcome, before: dict[str, Entry], after: dict[str, Entry]
) -> Finding | None:
    changed = altered(before, after)
    if outcome.status == 0 and case.expect != "refused":
        kept = set(changed) - set(outside(changed, _paths(case.keeps)))
        changed = [*outside(changed, _paths(case.writes)), *sorted(kept)]
    return ("destroyed", ", ".join(changed[:4])) if changed else None


def _paths(of_sandbox: Sequence[str]) -> list[str]:
    return [f"box/{path}" for path in of_sandbox]


def _leaked(outcome: Outcome, leaks: Sequence[str]) -> Finding | None:
    if SECRET in outcome.text:
        return "leaked", "the secret is in the output"
    return ("leaked", f"the secret is in {', '.join(leaks)}") if leaks else None


def _slow(outcome: Outcome) -> Finding | None:
    if outcome.status is None:
        return "slow", f"killed after {outcome.seconds:.0f} s"
    return ("slow", f"{outcome.seconds:.1f} s") if outcome.seconds > SLOW_SECONDS else None


def _broken(outcome: Outcome) -> Finding | None:
    if "Traceback (most recent call last)" in outcome.text:
        lines = [line for line in outcome.text.splitlines() if re.match(r"[\w.]+(:|$)", line)]
        return "traceback", lines[-1][:160] if lines else "?"
    if outcome.status not in (0, 1, 2, Unavailable.status, Preempted.status):
        return "traceback", f"status {outcome.status}"
    return None


def _message(case: Case, outcome: Outcome) -> Finding:
    errors = len(ERROR.findall(outcome.text))
    of_typer = "Usage: " in outcome.text and "\\x0a" not in outcome.text
    if outcome.status not in case.status:
        return "unclear", f"status {outcome.status}"
    if errors != 1 and not (of_typer and not errors):
        return "unclear", f"{errors} error messages"
    if outcome.status == 2 and not of_typer and "hint: " not in outcome.text:
        return "unclear", "no hint"
    if case.names not in outcome.text:
        return "unclear", f"does not name {case.names!r}"
    return "right", ""
