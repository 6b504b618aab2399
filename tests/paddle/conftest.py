"""Runs the Paddle side of comparisons in `.venv-paddle`; arrays are exchanged in files."""

import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lathe.backends.paddle_process import PYTHON_VARIABLE
from tests.support import environments, warm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(environments.GIVEN["paddle"] or ROOT / ".venv-paddle" / "bin" / "python")
Arrays = dict[str, np.ndarray]


_environment = pytest.MonkeyPatch()


def pytest_runtest_setup() -> None:
    """Fork every Paddle process from one that has imported it, also for module fixtures."""
    if PYTHON.is_file():
        _environment.setenv(PYTHON_VARIABLE, str(warm.interpreter(str(PYTHON))))
        for name, value in warm.for_children().items():
            _environment.setenv(name, value)


@pytest.hookimpl(trylast=True)  # after fixtures have restored the environment
def pytest_runtest_teardown() -> None:
    """Restore the environment: tests of other folders start real processes."""
    _environment.undo()


@pytest.fixture
def its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start real processes instead of forks, for tests that kill them."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(PYTHON))
    monkeypatch.delenv(warm.CHILDREN)


@pytest.fixture
def in_paddle(paddle_python: Path, tmp_path: Path) -> Callable[..., Arrays]:
    """Function that runs code in the Paddle environment.

    The code reads the arrays by name from `given` and stores its results in `out`.
    """

    def run(code: str, **given: np.ndarray) -> Arrays:
        np.savez(tmp_path / "given.npz", **given)
        script = tmp_path / "script.py"
        script.write_text(
            "from lathe_paddle.environment import prepare\nprepare()\n"
            "import numpy as np, paddle\nfrom pathlib import Path\n"
            f"folder = Path({str(tmp_path)!r})\n"
            "given, out = dict(np.load(folder / 'given.npz')), {}\n"
            + textwrap.dedent(code)
            + "\nnp.savez(folder / 'out.npz', **out)\n"
        )
        done = run_paddle(paddle_python, script)
        assert done.returncode == 0, done.stdout[-4000:]
        return dict(np.load(tmp_path / "out.npz"))

    return run


def run_paddle(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python in the Paddle environment; the result's stdout includes stderr."""
    return subprocess.run(
        [python, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
