"""Environments that tests require, and what a package's tests may import."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe.backends.paddle_process import find_python
from lathe_base.errors import Code
from lathe_serving.environment import find_environment
from tests.support import environments
from tests.support.errors import raises

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], ["serve", "paddle"]),
        (["tests"], ["serve", "paddle"]),
        (["tests/serve"], ["serve"]),
        (["tests/serve/test_backend.py::test_a_token_has_a_name[x]"], ["serve"]),
        (["tests/serve/runtime/test_batcher.py", "tests/model"], []),
        (["tests/model", "tests/paddle/test_gpt.py"], ["paddle"]),
        (["-x", "tests/serve/gateway/", str(TESTS / "launch")], ["serve", "paddle"]),
    ],
)
def test_a_selection_of_tests_names_its_environments(paths: list[str], expected: list[str]) -> None:
    """Works before anything is installed."""
    command = [sys.executable, "-I", "-S", str(environments.__file__), *paths]
    said = subprocess.run(
        command, cwd=environments.ROOT, check=True, capture_output=True, text=True
    )
    assert said.stdout.split() == expected


def test_every_file_that_is_named_is_there() -> None:
    for files in environments.NEEDED_BY.values():
        assert [file for file in files if not (TESTS / file).exists()] == []


def test_a_file_that_is_not_named_finds_no_environment() -> None:
    with raises(Code.NOT_INSTALLED, environments.UNNAMED):
        find_environment()
    with raises(Code.NOT_INSTALLED, environments.UNNAMED):
        find_python()
    for name in environments.NEEDED_BY:
        with pytest.raises(pytest.fail.Exception, match=f"needs {name}"):
            environments.require(name)


def test_one_that_is_named_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environments.expose(TESTS / "serve" / "test_backend.py")
    assert os.environ.get("LATHE_SERVE_PYTHON") == environments.GIVEN["serve"]
    assert os.environ["LATHE_PADDLE_PYTHON"] == environments.UNNAMED


def test_a_packages_tests_import_no_other_packages_tests_and_fixtures() -> None:
    def foreign(path: Path) -> Iterator[str]:
        own = ".".join(path.parent.relative_to(TESTS.parent).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            package, _, module = name.rpartition(".")
            is_of_tests = module == "conftest" or module.startswith("test_")
            if package.startswith("tests.") and package != own and is_of_tests:
                yield f"{path.relative_to(TESTS)}: {name}"

    assert [found for path in sorted(TESTS.rglob("*.py")) for found in foreign(path)] == []
