"""A case of the table: a folder laid out, a command run in it, and what is right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SECRET = "hunter2-secret"
"""The value of AWS_SECRET_ACCESS_KEY in every case: it may appear nowhere."""

Step = Callable[[Path], object]
Check = Callable[[Path], str | None]


class Skip(Exception):
    """Raised by a step: the case cannot be laid out on this machine."""


@dataclass(frozen=True)
class Case:
    """One command in a sandbox of its own.

    Attributes:
        verb: the command, or `component NAME`.
        kind: the row of its matrix; a group in the report.
        name: what tells it from the others of its row.
        argv: after `lathe`; `{silent}` stands for a port that accepts and never answers, `{s3}` for
            the address of an object store.
        component: the keyword arguments of a component instead: an artifact's name, or a value.
        needs: what is copied from the world into the sandbox.
        make: lays out the rest; given the sandbox, which is the working directory.
        expect: `any` is a proper refusal or a success.
        status: the exit statuses of a proper refusal.
        names: what the refusal's message must hold.
        writes: what a success may make or change, relative to the sandbox.
        keeps: what it may not, though it lies in `writes`.
        env: changes to the environment; None removes.
        as_user: run without root's rights, to which no folder is read-only.
        in_deleted: the working directory is removed before the command begins.
        fresh: run in a new interpreter, for settings that are read as it starts.
        cwd: where in the sandbox the command runs; `{box}` in `argv` is the sandbox.
        after: looks at the sandbox when all is over: what is wrong, or None. It always runs.
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
"""`destroyed`: a user's file was lost or altered. `accepted`: status 0 with a wrong input.
`leaked`: the secret is in an output. `leftover`: a refused run left a trace, or a run wrote beside
its output. `slow`: over 15 seconds, or never. `unclear`: refused without the name or the hint, or
with another status. `failed`: refused what is right. `skipped`: what it needs is not on this
machine."""


@dataclass(frozen=True)
class Verdict:
    case: str
    verdict: str
    why: str
    seconds: float
    command: str
    text: str
