"""Engines in separate processes: results, exceptions and crashes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lathe.export.engines import Array, Engine, Isolated
from lathe_base.errors import Code, StageError, UserError
from tests.support.errors import raises

quick = pytest.mark.usefixtures("quick_engines")


class Small(Engine):
    """An engine whose next token is the sum of all tokens modulo 5; token 6 crashes it."""

    version = "small 1.0"

    def __init__(self, folder: Path) -> None:
        if folder.name == "missing":
            raise ImportError("no module named small")

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        if 6 in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        return np.eye(5, dtype=np.float32)[tokens.cumsum(1) % 5]

    def encode(self, text: str) -> list[int]:
        if text == "two words":
            raise UserError(text, "leave one out", Code.TOO_LONG)
        if text == "three more words":
            raise StageError(text, Code.IO)
        return [int(part) for part in text.split()]


@pytest.mark.slow
@quick
def test_an_engine_answers_from_its_process() -> None:
    engine, here = Isolated("small", Small, Path()), Small(Path())
    tokens = np.array([[1, 2, 5]])
    assert engine.version == here.version
    assert np.array_equal(engine.logits(tokens), here.logits(tokens))
    assert engine.greedy([1, 2], 3) == here.greedy([1, 2], 3) == [3, 1, 2]
    with pytest.raises(ValueError, match="invalid literal"):
        engine.encode("x")
    with raises(Code.TOO_LONG, "two words", "leave one out"):
        engine.encode("two words")
    with raises(Code.IO, "three more words", kind=StageError):
        engine.encode("three more words")
    assert engine.encode("3 4") == [3, 4]


@quick
def test_its_crash_is_an_error() -> None:
    engine = Isolated("small", Small, Path())
    for _ in range(2):
        with raises(Code.KILLED, "small", "SIGSEGV", kind=StageError):
            engine.logits(np.array([[6]]))


@quick
def test_its_absence_is_its_own_error() -> None:
    with pytest.raises(ImportError, match="no module named small"):
        Isolated("small", Small, Path("missing"))


@pytest.mark.slow
def test_the_command_that_asks_for_it_is_not_run_again(tmp_path: Path) -> None:
    """A script without a `__main__` guard would run again whenever it is imported."""
    script = tmp_path / "command.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tests.export.test_engine import Isolated, Small\n"
        "print(Isolated('small', Small, Path()).version)\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "small 1.0\n", done.stderr
