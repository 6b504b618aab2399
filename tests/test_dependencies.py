"""pyproject.toml declares exactly what the code imports; the lock files satisfy it."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lathe_base import __version__

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "lathe_base": ("lathe_base",),
    "lathe_launch": ("lathe_launch",),
    "lathe_serving": ("lathe_serving",),
    "lathe": ("lathe",),
    "lathe_paddle": ("lathe_paddle",),
    ".": ("components", "pipelines"),
}
"""Folder of a distribution's pyproject.toml -> its packages."""

PROJECTS: dict[str, dict[str, Any]] = {
    folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    for folder in DISTRIBUTIONS
}
OURS = {package for packages in DISTRIBUTIONS.values() for package in packages}
OPTIONAL = {
    "cards": "lathe/report/cards/",
    "cluster": "lathe_launch/cluster/",
    "data": ("lathe/data/sources.py", "lathe/data/cleaning.py", "lathe/data/sentences.py"),
    "formats": "lathe/export/formats/openvino.py",
    "pages": ("lathe_base/pages/", "lathe_serving/client/"),
    "server": (
        "lathe_serving/gateway/",
        "lathe_serving/runtime/openvino_",
        "lathe_serving/runtime/grammar_",
    ),
    "tracing": "lathe_serving/gateway/telemetry.py",
    "tracking": "lathe_base/tracking/",
}
"""Extra -> the files that may import its packages."""

ELSEWHERE = {
    "lathe/train/trace.py": {"tensorboardx"},
    "lathe_serving/runtime/vllm_engine.py": {"vllm"},
    "lathe_serving/runtime/vllm_logits.py": {"vllm"},
}
"""Packages that a file imports where torch is absent, or in an environment of its own."""

PACKAGES = {  # packages whose module has another name
    "cyclonedx": "cyclonedx-python-lib",
    "google": "protobuf",
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "packageurl": "packageurl-python",
    "paddle": "paddlepaddle",
    "yaml": "pyyaml",
}
PROVIDED = {"triton_python_backend_utils"}  # by Triton, in its backends
NOT_BY_NAME = {
    "kfp-kubernetes",  # is the module kfp.kubernetes
    "opentelemetry-exporter-otlp-proto-http",  # is the module opentelemetry.exporter
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
    "images/serve/cuda.lock": ("serve-cuda", False),
    "images/serve-vllm/requirements.lock": ("vllm", False),
    "images/serve-vllm/cuda.lock": ("vllm-cuda", False),
    "images/janitor/requirements.lock": ("janitor", False),
    "images/paddle/requirements.lock": ("paddle", False),
    "images/paddle/cuda.lock": ("paddle-cuda", False),
    "requirements-dev.lock": ("dev", False),
}
"""Lock file: dependency group, and whether it includes what the pipelines need."""


def required(folder: str) -> list[Requirement]:
    return [Requirement(text) for text in PROJECTS[folder]["project"]["dependencies"]]


def extras(folder: str) -> dict[str, list[Requirement]]:
    found = PROJECTS[folder]["project"].get("optional-dependencies", {})
    return {name: [Requirement(text) for text in texts] for name, texts in found.items()}


def with_ours(requirements: Iterable[Requirement]) -> Iterator[Requirement]:
    """Requirements, and instead of our own distributions what these require."""
    for requirement in requirements:
        folder = requirement.name.replace("-", "_")
        if folder not in OURS:
            yield requirement
            continue
        yield from with_ours(required(folder))
        for extra in requirement.extras:
            yield from with_ours(extras(folder)[extra])


def group(name: str) -> Iterator[Requirement]:
    for part in PROJECTS["."]["dependency-groups"][name]:
        if isinstance(part, str):
            yield Requirement(part)
        else:
            yield from group(part["include-group"])


def names(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def imported(tree: ast.Module) -> set[str]:
    """Packages of others, and distributions of ours, that a file imports anywhere."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    found = {module.partition(".")[0] for module in modules}
    found -= PROVIDED | set(sys.stdlib_module_names)
    return {canonicalize_name(PACKAGES.get(module, module)) for module in found}


@functools.cache
def imports(folder: str) -> dict[str, set[str]]:
    """What the files of a distribution import, by path."""
    packages = DISTRIBUTIONS[folder]
    own = {canonicalize_name(package) for package in packages}
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    return {
        file.relative_to(ROOT).as_posix(): imported(ast.parse(file.read_text(encoding="utf-8")))
        - own
        for file in sorted(files)
    }


def pins(lock: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_import_is_declared(folder: str) -> None:
    undeclared = []
    for path, packages in imports(folder).items():
        declared = names(required(folder)) | ELSEWHERE.get(path, set())
        for extra, requirements in extras(folder).items():
            if path.startswith(OPTIONAL.get(extra, "nowhere")):
                declared |= names(requirements)
        if folder == "lathe_paddle":  # ours are on the path there: see its pyproject.toml
            declared |= {canonicalize_name(package) for package in OURS}
        undeclared += [f"{path}: {package}" for package in sorted(packages - declared)]
    assert undeclared == []


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_declared_package_is_imported(folder: str) -> None:
    used = set().union(*imports(folder).values()) | NOT_BY_NAME
    declared = [*required(folder), *chain.from_iterable(extras(folder).values())]
    in_formats = names(extras(folder).get("formats", []))  # opened by name: lathe/export/engines.py
    assert names(declared) - used - in_formats - {canonicalize_name(name) for name in OURS} == set()


def test_every_package_of_an_image_is_imported() -> None:
    used = set().union(*(chain.from_iterable(imports(folder).values() for folder in DISTRIBUTIONS)))
    assert names(group("serve")) - used - NOT_BY_NAME == set()
    assert names(group("paddle")) - used - NOT_BY_NAME - FOR_PADDLESLIM == set()


def test_the_janitors_image_has_what_the_janitor_imports() -> None:
    """What its modules import when they are imported: what they import later is of stores."""
    code = "import sys, lathe_launch.cluster.janitor\n"
    code += (
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('lathe')), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    needed = set()
    for file in map(Path, said.stdout.split()):
        assert file.relative_to(ROOT).parts[0] in ("lathe_base", "lathe_launch")
        body = ast.parse(file.read_text(encoding="utf-8")).body
        at_once = ast.Module([x for x in body if isinstance(x, ast.Import | ast.ImportFrom)], [])
        needed |= imported(at_once)
    ours = {canonicalize_name(name) for name in OURS}
    assert needed - ours == names(group("janitor"))


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_dependency_is_bounded(folder: str) -> None:
    for requirement in chain(required(folder), *extras(folder).values()):
        operators = {part.operator for part in requirement.specifier}
        if requirement.extras and requirement.name.startswith("lathe") and not operators:
            continue  # an extra of another distribution, whose version is a requirement already
        assert operators in ({">=", "<"}, {"=="}), str(requirement)


def test_the_distributions_have_one_version() -> None:
    versions = {project["project"]["version"] for project in PROJECTS.values()}
    assert versions == {__version__}
    for requirement in chain.from_iterable(required(folder) for folder in DISTRIBUTIONS):
        if requirement.name.startswith("lathe"):
            assert str(requirement.specifier) == f"=={__version__}"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_file_satisfies_the_bounds(lock: str) -> None:
    name, with_package = LOCKS[lock]
    wanted = list(group(name))
    if with_package:
        wanted += with_ours(required("."))
    pinned = pins(ROOT / lock)
    broken = [
        f"{requirement}, locked: {pinned.get(canonicalize_name(requirement.name))}"
        for requirement in wanted
        if not requirement.specifier.contains(
            pinned.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert broken == []
