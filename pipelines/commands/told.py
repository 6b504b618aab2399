"""Ends the commands of this package with a message instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lathe.errors import ENDINGS, UserError, explain


@contextmanager
def told() -> Iterator[None]:
    """End the process with the messages of what the block raises, and no traceback."""
    try:
        yield
    except ExceptionGroup as group:
        fail("\n".join(f"error: {error}" for error in group.exceptions), UserError.status)
    except ENDINGS as error:
        message = explain(error)
        fail(f"error: {message}", message.status)


def fail(message: str, status: int) -> NoReturn:
    """End with a message on stderr."""
    print(message, file=sys.stderr)
    raise SystemExit(status)
