"""docs/reference/environment.md lists every variable of Lathe that users may set."""

import re

from tests.documents.pages import TEXTS
from tests.support.sources import python_files

INTERNAL = {"LATHE_PADDLE_LOGS", "LATHE_PADDLE_MARK", "LATHE_SOAK_SECONDS", "LATHE_TIED"}
INTERNAL |= {"LATHE_RESTARTS_FD"}
"""Variables used between Lathe's own processes, or only by tests."""


def test_every_variable_is_there() -> None:
    used = set()
    for path in python_files():
        used |= set(re.findall(r"\"(LATHE_[A-Z0-9_]*[A-Z])\"", path.read_text(encoding="utf-8")))
    used |= {f"LATHE_{name}_IMAGE" for name in ("TRAIN", "SERVE", "PADDLE")}
    named = set(re.findall(r"`(LATHE_\w+)`", TEXTS["docs/reference/environment.md"]))
    assert named == used - INTERNAL
