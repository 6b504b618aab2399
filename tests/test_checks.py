"""Lists of checks: what each becomes, which are left out, and what a command shows."""

import errno
from collections.abc import Callable, Iterator

import pytest

from lathe_base.checks import Check, Finding, require, run_checks
from lathe_base.errors import Code, StageError, UserError


def failing(error: Exception) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


def several() -> Iterator[Finding]:
    yield Finding("first", "ok", "fine")
    raise UserError("second is wrong", "fix it", Code.INVALID_VALUE)


MISSING = OSError(errno.ENOENT, "No such file or directory", "a.txt")


@pytest.mark.parametrize(
    ("check", "is_preflight", "found"),
    [
        (Check("a", lambda: "fine"), False, [Finding("a", "ok", "fine")]),
        (Check("a", lambda: {"of": "no interest"}), False, [Finding("a", "ok")]),
        (
            Check("a", failing(UserError("x", "y", Code.INVALID_VALUE)), "z"),
            True,
            [Finding("a", "broken", "x", "y", Code.INVALID_VALUE)],
        ),
        (
            Check("a", failing(UserError("x", "y", Code.INVALID_VALUE)), severity="warning"),
            False,
            [Finding("a", "warning", "x", "y", Code.INVALID_VALUE)],
        ),
        (
            Check("a", failing(StageError("x", Code.TIMEOUT)), "z"),
            False,
            [Finding("a", "broken", "x", "z", Code.TIMEOUT)],
        ),
        (
            Check("a", failing(StageError("x", Code.TIMEOUT))),
            True,
            [Finding("a", "warning", "not checked: x", code=Code.TIMEOUT)],
        ),
        (
            Check("a", failing(MISSING)),
            True,
            [
                Finding(
                    "a",
                    "broken",
                    "a.txt: No such file or directory",
                    "check the path",
                    Code.NOT_FOUND,
                )
            ],
        ),
        (
            Check("a", failing(OSError("reset")), "z"),
            False,
            [Finding("a", "broken", "reset", "z", Code.IO)],
        ),
        (
            Check("a", several),
            False,
            [
                Finding("first", "ok", "fine"),
                Finding("a", "broken", "second is wrong", "fix it", Code.INVALID_VALUE),
            ],
        ),
    ],
)
def test_findings(check: Check, is_preflight: bool, found: list[Finding]) -> None:
    assert list(run_checks([check], is_preflight)) == found


def test_what_needs_a_failed_check_is_left_out() -> None:
    ran: list[str] = []
    checks = [
        Check("server", failing(UserError("no answer", "start it", Code.UNREACHABLE))),
        Check("list", lambda: ran.append("list"), after="server"),
        Check("read", lambda: ran.append("read"), after="list"),
        Check("other", lambda: ran.append("other")),
    ]
    assert [finding.check for finding in run_checks(checks)] == ["server", "other"]
    assert ran == ["other"]


def test_all_problems_are_raised_together_after_the_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [
        Check("image", failing(StageError("no registry", Code.SERVER_ERROR))),
        Check(
            "nodes",
            failing(UserError("too few", "add some", Code.TOO_LITTLE_DATA)),
            severity="warning",
        ),
        Check("model", failing(UserError("model m: missing", "give one", Code.NOT_FOUND))),
        Check("corpus", failing(UserError("corpus c: empty", "add text", Code.TOO_LITTLE_DATA))),
    ]
    with pytest.raises(ExceptionGroup) as caught:
        require(checks, elsewhere="look there")
    assert [(error.what, error.hint, error.code) for error in caught.value.exceptions] == [
        ("model m: missing", "give one", Code.NOT_FOUND),
        ("corpus c: empty", "add text", Code.TOO_LITTLE_DATA),
    ]
    assert capsys.readouterr().out == (
        "image: not checked: no registry\nwarning: too few\n  hint: add some\nlook there\n"
    )
    require(checks[1:2], elsewhere="look there")
    assert "look there" not in capsys.readouterr().out
