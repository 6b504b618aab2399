"""Cache keys of images named by a tag change with the code and lock files of the image."""

from pathlib import Path

import pytest

from pipelines.compiler.compile import SOURCES, code_digest
from pipelines.steps.resources import Variant
from tests.support.compiled import compiled


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a module in each package, and a lock file."""
    for package in SOURCES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text("ONE = 1\n")
    lock = tmp_path / "images" / "train" / "requirements.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("torch==1\n")
    return tmp_path


@pytest.mark.parametrize(
    "path", ["lathe/module.py", "components/module.py", "lathe_base/recipes/tiny.yaml",
             "images/train/requirements.lock"]
)  # fmt: skip
def test_every_file_of_an_image_counts(tree: Path, path: str) -> None:
    before = code_digest(tree)
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("ONE = 2\n")
    code_digest.cache_clear()
    assert code_digest(tree) != before


@pytest.mark.parametrize("path", ["pipelines/full.py", "tests/test_one.py",
                                  "lathe/__pycache__/module.pyc"])  # fmt: skip
def test_other_files_do_not(tree: Path, path: str) -> None:
    before = code_digest(tree)
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text("ONE = 2\n")
    code_digest.cache_clear()
    assert code_digest(tree) == before


def test_it_is_an_argument_of_each_step_whose_image_has_a_tag() -> None:
    spec, _ = compiled("full", Variant(code="0123"))
    containers = {
        label: executor["container"]
        for label, executor in spec["deploymentSpec"]["executors"].items()
        if "container" in executor
    }
    told = {label for label, c in containers.items() if c["args"][-2:] == ["--code", "0123"]}
    assert told == containers.keys() - {"exec-inputs", "exec-notify"}  # which are never cached
