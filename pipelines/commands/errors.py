"""Reports a command's expected errors as messages instead of tracebacks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lathe_base.errors import EXPECTED_ERRORS, UserError, coded, explain


@contextmanager
def error_messages() -> Iterator[None]:
    """Exit with a message, not a traceback, for the expected errors that the block raises."""
    try:
        yield
    except ExceptionGroup as group:
        errors = [error for error in group.exceptions if isinstance(error, EXPECTED_ERRORS)]
        fail("\n".join(coded(explain(error)) for error in errors), UserError.status)
    except EXPECTED_ERRORS as error:
        told = explain(error)
        fail(coded(told), told.status)


def fail(message: str, status: int) -> NoReturn:
    """Exit with a message on stderr."""
    print(message, file=sys.stderr)
    raise SystemExit(status)
