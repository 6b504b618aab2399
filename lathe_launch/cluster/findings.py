"""The result of a cluster check, and its format in a pod's log."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from lathe_base.errors import StageError, UserError

State = Literal["ok", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        said: what was found, in a few words.
        hint: how to fix it; empty if all is well.
    """

    check: str
    state: State
    said: str = ""
    hint: str = ""

    def line(self) -> str:
        """One line of JSON, which `of_line` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> "Finding | None":
        """The finding in a log line; None for other lines."""
        try:
            values = json.loads(line)
            return cls(**values) if isinstance(values, dict) else None
        except (ValueError, TypeError):
            return None


def examine(
    check: str, function: Callable[[], "str | Finding"], hint: str = "", severity: State = "broken"
) -> Finding:
    """Call `function`, which returns its result or raises an error.

    Args:
        hint: used if the exception has no hint.
        severity: severity of an error.
    """
    try:
        found = function()
    except UserError as error:
        return Finding(check, severity, error.what, error.hint)
    except (StageError, OSError) as error:
        return Finding(check, severity, str(error), hint)
    return found if isinstance(found, Finding) else Finding(check, "ok", found)
