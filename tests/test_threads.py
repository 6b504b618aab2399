"""OpenMP settings, as reported by torch's OpenMP library when it is loaded."""

import os
import re
import subprocess
import sys

import pytest

OURS = "3000"
LOADS = """
import ctypes, importlib.util, lathe, pathlib
(torch,) = importlib.util.find_spec("torch").submodule_search_locations
for path in pathlib.Path(torch).parent.glob("torch*/**/libgomp*"):
    ctypes.CDLL(str(path))
"""


def spin_count(**given: str) -> str:
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=environment | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("torch was not built with GNU OpenMP")
    (found,) = re.findall(r"GOMP_SPINCOUNT = '(.*)'", done.stderr)
    return str(found)


def test_a_waiting_thread_soon_gives_its_core_away() -> None:
    assert spin_count() == OURS


def test_an_explicit_spin_count_is_kept() -> None:
    assert spin_count(GOMP_SPINCOUNT="77") == "77"
    assert int(spin_count(OMP_WAIT_POLICY="active")) > int(OURS)
