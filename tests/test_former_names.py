"""Modules that have moved are found by their former names, as the same modules, with a warning."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lathe.former_names import MOVED, present_name
from tests.support.tables import quick_only

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:.* has moved to:DeprecationWarning")  # its parents' names
@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_is_the_module_itself(former: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} has moved to {MOVED[former]}"):
        assert import_module(former) is import_module(MOVED[former])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_inside_follow() -> None:
    assert present_name("lathe.serve.client.load") == "lathe_serving.client.load"
    assert present_name("lathe.storage.artifacts.kinds") == "lathe_base.artifacts.kinds"
    assert present_name("lathe.production.tracking.runs") == "lathe_base.tracking.runs"
    assert present_name("lathe.train.loop") is None
    with pytest.raises(ModuleNotFoundError, match=r"lathe\.serve\.nothing"):
        import_module("lathe.serve.nothing")


@pytest.mark.parametrize(
    "module",
    quick_only(["lathe.storage", "lathe.provenance", "lathe.serve.gateway"], ["lathe.storage"]),
)
def test_a_module_runs_by_its_former_name(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_the_bytecode_of_a_former_package_is_no_package(tmp_path: Path) -> None:
    """Git leaves the folders that have `__pycache__` in them."""
    (tmp_path / "lathe" / "serve" / "__pycache__").mkdir(parents=True)
    for name in ("__init__", "former_names"):
        (tmp_path / "lathe" / f"{name}.py").write_bytes(
            (ROOT / "lathe" / f"{name}.py").read_bytes()
        )
    (tmp_path / "lathe_base").symlink_to(ROOT / "lathe_base")
    (tmp_path / "lathe_serving").symlink_to(ROOT / "lathe_serving")
    code = "import lathe.serve.state as s; print(s.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "lathe_serving.state\n", done.stderr
