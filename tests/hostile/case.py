"""A case of the table: a prepared folder, a command to run in it, and the expected result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SECRET = "hunter2-secret"
"""AWS_SECRET_ACCESS_KEY in every case; it must not appear in any output."""

Step = Callable[[Path], object]
Check = Callable[[Path], str | None]


class Skip(Exception):
    """Raised by a step if the case cannot be prepared on this machine."""


@dataclass(frozen=True)
class Case:
    """A command that runs in its own sandbox folder.

    Attributes:
        verb: the command, or `component NAME`.
        kind: row of the table, a group in the report.
        name: name of the case within its row.
        argv: arguments after `lathe`. `{silent}` is replaced with a port that accepts connections
            and never answers, `{s3}` with the address of an object store, and `{box}` with the
            sandbox.
        component: if set, keyword arguments of a component (artifact names or values) to call
            instead of a command.
        needs: artifacts to copy from the world into the sandbox.
        make: functions that prepare the rest of the sandbox, called with its path.
        expect: `any` allows both success and a proper error.
        status: exit statuses of a proper error.
        names: text that the error message must contain.
        writes: paths in the sandbox that a successful command may create or change.
        keeps: paths within `writes` that it must not change.
        env: changes to the environment; None removes a variable.
        as_user: run without root's capabilities, since root can write to read-only folders.
        in_deleted: delete the working directory before the command starts.
        fresh: run in a new interpreter, for settings that are read at startup.
        cwd: working directory of the command, relative to the sandbox.
        after: final check of the sandbox, which always runs; returns a complaint or None.
    """

    verb: str
    kind: str
    name: str
    argv: tuple[str, ...] = ()
    component: Mapping[str, Any] | None = None
    needs: tuple[str, ...] = ()
    make: tuple[Step, ...] = ()
    expect: Literal["refused", "works", "any"] = "refused"
    status: tuple[int, ...] = (2,)
    names: str = ""
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    as_user: bool = False
    fresh: bool = False
    in_deleted: bool = False
    cwd: str = ""
    after: Check | None = None

    @property
    def id(self) -> str:
        return f"{self.verb} / {self.kind} / {self.name}"

    @property
    def group(self) -> str:
        return f"{self.verb} / {self.kind}"


VERDICTS = (
    "right",
    "destroyed",
    "leaked",
    "traceback",
    "accepted",
    "slow",
    "leftover",
    "unclear",
    "failed",
    "skipped",
)
"""Possible verdicts.

- `destroyed`: a user's file was deleted or changed.
- `leaked`: the secret is in an output.
- `traceback`: ended with a traceback or an unexpected status.
- `accepted`: exit status 0 for invalid input.
- `slow`: took more than 15 seconds, or did not end.
- `leftover`: a failed run left files, or a run wrote outside its output.
- `unclear`: the error lacks the name or the hint, or has another status.
- `failed`: valid input was rejected.
- `skipped`: something that the case needs is not available on this machine.
"""


@dataclass(frozen=True)
class Verdict:
    case: str
    verdict: str
    why: str
    seconds: float
    command: str
    text: str
