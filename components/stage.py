"""Shared setup of every component: plain logs, the recipe, errors."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from components import tracking
from components.supervise import CRASHED, MARK, allow_restarts
from lathe.data.run_inputs import Contents, require_unchanged
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.console import end_cleanly_on_sigterm, print_any_text
from lathe_base.errors import EXPECTED_ERRORS, explain
from lathe_launch.parent import die_with_tied_shell
from lathe_launch.shape import WorkerFailed


class _MarkEveryLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(MARK + line for line in super().format(record).splitlines())


def log_plainly() -> logging.Logger:
    """Print Lathe's log lines, each with a marker."""
    print_any_text()
    log = logging.getLogger("lathe")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_MarkEveryLine())
    log.handlers, log.propagate = [handler], False  # KFP's executor logs at the root
    log.setLevel(logging.INFO)
    return log


@contextmanager
def stage(
    recipe: str,
    overrides: Sequence[str],
    contents: Contents | None = None,
    restarts: int | None = None,
) -> Iterator[Recipe]:
    """Yield the recipe; a UserError ends the process with its message and status 2.

    Args:
        contents: required content identifiers of the addresses that the step reads.
        restarts: maximum number of restarts of a step that is killed in its pod; default: the
            recipe's `Launch.restarts`.
    """
    die_with_tied_shell()
    end_cleanly_on_sigterm()
    log = log_plainly()
    try:
        settings = load_recipe(recipe, overrides)
        allow_restarts(settings.Launch.restarts if restarts is None else restarts)
        # An input that has changed since the run began would be cached under the wrong key.
        require_unchanged(contents or {})
        with tracking.tracked(recipe, settings):
            yield settings
    except EXPECTED_ERRORS as error:
        told = explain(error)
        for line in str(told).splitlines():
            log.error("error[%s]: %s", told.code, line)
        # The supervisor restarts a step that lost a worker, as it does one that was killed itself.
        was_killed = isinstance(error, WorkerFailed) and error.exit_code < 0
        raise SystemExit(CRASHED if was_killed else told.status) from error


def options(recipe: str, overrides: Sequence[str]) -> list[str]:
    """The recipe and its overrides as command-line options."""
    return ["--recipe", recipe, *(part for value in overrides for part in ("-o", value))]
