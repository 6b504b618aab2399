"""pyproject.toml declares exactly what the code imports; the lock files satisfy it."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {"lathe", "components", "pipelines"}
NEEDS_CLUSTER = ("lathe_launch/cluster/", "components/", "pipelines/")
ALSO_IN_PADDLE = {"lathe/train/trace.py"}  # tensorboardX, where torch is absent
PACKAGES = {  # packages whose module has another name
    "cyclonedx": "cyclonedx-python-lib",
    "google": "protobuf",
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "packageurl": "packageurl-python",
    "paddle": "paddlepaddle",
    "yaml": "pyyaml",
}
PROVIDED = {"triton_python_backend_utils"}  # by Triton, in its backends
NOT_BY_NAME = {
    "kfp-kubernetes",  # is the module kfp.kubernetes
    "nvidia-pytriton",  # carries the program tritonserver
    "pyopenssl",  # model_signing imports it without declaring it
    "tensorboard",  # torch.utils.tensorboard imports it
    "uvloop",  # uvicorn uses it if installed
}
FOR_PADDLESLIM = {"pip", "requests", "setuptools", "six"}  # which does not declare them

LOCKS = {
    "images/train/requirements.lock": ("train", True),
    "images/train/cuda.lock": ("train-cuda", True),
    "images/serve/requirements.lock": ("serve", False),
    "images/serve/triton.lock": ("serve-triton", False),
    "images/serve/cuda.lock": ("serve-cuda", False),
    "images/paddle/requirements.lock": ("paddle", False),
    "images/paddle/cuda.lock": ("paddle-cuda", False),
    "requirements-dev.lock": ("dev", False),
}
"""Lock file: dependency group, and whether it includes the package's own dependencies."""


def base() -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["project"]["dependencies"]]


def extra(name: str) -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["project"]["optional-dependencies"][name]]


def group(name: str) -> Iterator[Requirement]:
    for part in PROJECT["dependency-groups"][name]:
        if isinstance(part, str):
            yield Requirement(part)
        else:
            yield from group(part["include-group"])


def names(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def imported(file: Path) -> set[str]:
    """Third-party packages that a file imports anywhere."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    found = {module.partition(".")[0] for module in modules}
    found -= OURS | PROVIDED | set(sys.stdlib_module_names)
    return {canonicalize_name(PACKAGES.get(module, module)) for module in found}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Imported packages by path of the source file."""
    files = [file for folder in OURS for file in (ROOT / folder).rglob("*.py")]
    return {file.relative_to(ROOT).as_posix(): imported(file) for file in sorted(files)}


def pins(lock: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_every_import_is_declared() -> None:
    undeclared = []
    for path, packages in imports().items():
        declared = names(base())
        if path.startswith(NEEDS_CLUSTER):
            declared |= names(extra("cluster"))
        runtime = "lathe_serving/runtime/"
        if path.startswith(("lathe_serving/gateway/", f"{runtime}openvino_", f"{runtime}grammar_")):
            declared |= names(extra("serve"))
        if path == "lathe/export/formats/openvino.py":
            declared |= names(extra("formats"))
        if path.startswith("lathe_base/tracking/"):
            declared |= names(extra("tracking"))
        if path.startswith("lathe_paddle/") or path in ALSO_IN_PADDLE:
            declared |= names(group("paddle"))
        undeclared += [f"{path}: {package}" for package in sorted(packages - declared)]
    assert undeclared == []


def test_every_declared_package_is_imported() -> None:
    used = set().union(*imports().values()) | NOT_BY_NAME
    extras = (extra(name) for name in ("cluster", "tracking", "serve"))
    runtime = [*base(), *chain.from_iterable(extras), *group("serve")]
    assert names(runtime) - used == set()
    assert names(group("paddle")) - used - FOR_PADDLESLIM == set()


def test_every_dependency_of_the_package_is_bounded() -> None:
    extras = (extra(name) for name in ("cluster", "tracking", "formats", "serve"))
    for requirement in chain(base(), *extras):
        operators = {part.operator for part in requirement.specifier}
        assert operators in ({">=", "<"}, {"=="}), str(requirement)


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_file_satisfies_the_bounds(lock: str) -> None:
    name, with_package = LOCKS[lock]
    wanted = list(group(name))
    if with_package:
        wanted += [*base(), *extra("cluster"), *extra("tracking")]
    if name == "train-cuda":  # onnxruntime-gpu provides the same module
        wanted = [requirement for requirement in wanted if requirement.name != "onnxruntime"]
    pinned = pins(ROOT / lock)
    broken = [
        f"{requirement}, locked: {pinned.get(canonicalize_name(requirement.name))}"
        for requirement in wanted
        if not requirement.specifier.contains(
            pinned.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert broken == []
