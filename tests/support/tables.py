"""Tables of cases, of which some run with every change and the others with `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_only(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as parameters; those that are not in `quick` are slow. A case may be a tuple.

    Raises:
        AssertionError: `quick` has something that is not a case.
    """
    every = list(cases)
    assert all(case in every for case in quick), quick
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in every
    ]
