"""Checks before a command begins its work: each command has one list of them, and they are run and
shown here."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from lathe_base.errors import Code, StageError, UserError, explain

State = Literal["ok", "warning", "broken"]
NOT_CHECKED = "not checked: "
STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: what was checked.
        said: what was found, in a few words.
        hint: how to fix it; empty if all is well.
        code: the kind of the problem.
    """

    check: str
    state: State
    said: str = ""
    hint: str = ""
    code: Code = Code.FAILED

    def line(self) -> str:
        """One line of JSON, which `of_line` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> "Finding | None":
        """The finding in a log line; None for other lines."""
        try:
            values = json.loads(line)
            code = Code(values.pop("code", Code.FAILED))  # a doctor of an older image has none
            return cls(**values, code=code)
        except (ValueError, TypeError, AttributeError):
            return None


@dataclass(frozen=True)
class Check:
    """One check of a command.

    Attributes:
        name: what is checked.
        run: raises a UserError, StageError or OSError if it fails. A string that it returns says
            what it found, and an iterator yields several findings; other values are ignored.
        hint: used if the error has none.
        severity: state of what fails.
        after: name of an earlier check, without which this one makes no sense.
    """

    name: str
    run: Callable[[], object]
    hint: str = ""
    severity: State = "broken"
    after: str = ""


def run_checks(checks: Iterable[Check], is_preflight: bool = False) -> Iterator[Finding]:
    """Run checks in their order, and yield what they find as it arrives.

    A check whose `after` did not succeed is left out: its error would only repeat the other's.

    Args:
        is_preflight: whether work follows, perhaps elsewhere: what does not answer here and now
            (StageError) may answer it, so it is only a warning that this was not checked.
    """
    failed = set[str]()
    for check in checks:
        if check.after in failed:
            # As failed, so that what comes after this one is left out too.
            failed.add(check.name)
            continue
        for finding in _findings(check, is_preflight):
            if finding.state != "ok":
                failed.add(check.name)
            yield finding


def _findings(check: Check, is_preflight: bool) -> Iterator[Finding]:
    try:
        value = check.run()
        if isinstance(value, Iterator):
            yield from value
        else:
            yield Finding(check.name, "ok", value if isinstance(value, str) else "")
    except UserError as error:
        yield Finding(check.name, check.severity, error.what, error.hint, error.code)
    except StageError as error:
        if is_preflight:
            yield Finding(check.name, "warning", f"{NOT_CHECKED}{error}", code=error.code)
        else:
            yield Finding(check.name, check.severity, str(error), check.hint, error.code)
    except OSError as error:
        what, hint = str(error), check.hint
        explained = explain(error, check.name)
        if not hint and isinstance(explained, UserError):
            what, hint = explained.what, explained.hint
        yield Finding(check.name, check.severity, what, hint, explained.code)


def findings_table(findings: Iterable[Finding]) -> Table:
    """A table with one line per check, and a fix below each problem."""
    table = Table("check", "", "found")
    for finding in findings:
        hint = f"\n{finding.hint}" if finding.state != "ok" and finding.hint else ""
        state = Text(finding.state, STYLES[finding.state])
        table.add_row(finding.check, state, Text(finding.said + hint))
    return table


def require(checks: Iterable[Check], elsewhere: str = "") -> None:
    """Run the checks that precede a command's work, and print what they warn of.

    Args:
        elsewhere: printed if something was not checked: where it can be.

    Raises:
        ExceptionGroup: all problems, as UserErrors.
    """
    problems, unchecked = list[UserError](), False
    for finding in run_checks(checks, is_preflight=True):
        if finding.state == "broken":
            problems.append(UserError(finding.said, finding.hint, finding.code))
        elif finding.state == "warning":
            unchecked |= finding.said.startswith(NOT_CHECKED)
            hinted = f"warning: {finding.said}\n  hint: {finding.hint}"
            print(hinted if finding.hint else f"{finding.check}: {finding.said}")
    if unchecked and elsewhere:
        print(elsewhere)
    if problems:  # all at once, so that one round of corrections is enough
        raise ExceptionGroup("problems", problems)
