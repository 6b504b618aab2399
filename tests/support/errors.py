"""Tests of errors ask for the code, and for what the message has to name, not for its wording."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lathe_base.errors import Code, UserError


@contextmanager
def raises(
    code: Code, *texts: object, kind: type[Any] = UserError
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect a UserError or StageError (`kind`, or a subclass) with this code, whose message has
    all `texts`: the names, paths and values that it must name."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert caught.value.code is code, f"{caught.value.code}: {message}"
    missing = [text for text in map(str, texts) if text not in message]
    assert not missing, f"{missing} not in: {message}"
