"""How the commands of this package end: with a message, and no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lathe.errors import StageError, UserError


@contextmanager
def told() -> Iterator[None]:
    """End the process with the messages of what the block raises, and no traceback."""
    try:
        yield
    except ExceptionGroup as group:
        fail("\n".join(f"error: {error}" for error in group.exceptions), UserError.status)
    except (UserError, StageError) as error:
        fail(f"error: {error}", error.status)
    except OSError as error:
        where = error.filename or "the run"
        fail(f"error: {where}: {error.strerror}\n  hint: check the path and its disk's space", 1)


def fail(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)
