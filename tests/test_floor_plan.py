"""Allowed imports between packages and rooms, and third-party libraries of each environment."""

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.sources import PACKAGES, PIPELINES, ROOT

LAYERS = (
    {"lathe_base.errors", "lathe_base.console", "lathe_base.ports", "lathe_base.progress"},
    {
        *{"lathe_base.checks", "lathe_base.inputs", "lathe_base.pages", "lathe_base.parameters"},
        "lathe_base.storage",
    },
    {"lathe_base.config", "lathe_base.tracking"},
    {"lathe_base.artifacts"},
    {"lathe_base.provenance"},
    {"lathe_launch", "lathe_serving.runtime"},
    {"lathe_launch.cluster", "lathe_serving"},
    {"lathe_serving.client"},
    {"lathe_serving.gateway"},
    {"lathe.former_names"},
    {"lathe.data"},
    {"lathe.model"},
    {"lathe.train", "lathe.export"},
    {"lathe.evaluate"},
    {"lathe.compress"},
    {"lathe.backends", "lathe.plan", "lathe.report"},
    {"lathe.release", "lathe.search"},
    {"lathe.cli"},
    {"lathe.__main__", "lathe_paddle"},
)
"""Rooms: a package's subpackages and, under the package's own name, its other modules. A room may
import from layers above its own, but not from its own layer or those below."""

LIBRARIES = {
    "torch": {
        *{
            "lathe.model",
            "lathe.train",
            "lathe.export",
            "lathe.evaluate",
            "lathe.compress",
            "lathe_launch",
            "lathe.cli",
            "lathe.release",
        },
        *{"lathe.search", "lathe.plan"},
    },
    "paddle": {"lathe_paddle"},
    "paddleslim": {"lathe_paddle"},
    "paddle2onnx": {"lathe_paddle"},
    "kfp": set[str](),
    "kubernetes": {"lathe_launch.cluster"},
    "kubeflow_trainer_api": {"lathe_launch.cluster"},
    "gguf": {"lathe.model", "lathe.export"},
    "pyarrow": {"lathe.data"},
    "sentencex": {"lathe.data"},
    "onnxruntime": {"lathe_serving.runtime", "lathe.export", "lathe_paddle"},
    "onnx": {"lathe.export", "lathe_paddle", "lathe_serving.runtime", "lathe.release.certify"},
    "openvino": {"lathe_serving.runtime", "lathe.export"},
    "openvino_tokenizers": {"lathe.export"},
    "transformers": {"lathe.export"},
    "llguidance": {"lathe_serving.runtime"},
    "vllm": {"lathe_serving.runtime"},
    "minio": {"lathe_base.storage"},
    "tenacity": {"lathe_base.storage", "lathe_launch.cluster"},
    "urllib3": {"lathe_base.storage", "lathe_launch.cluster"},
    "matplotlib": {
        "lathe_base.pages",
        "lathe.compress",
        "lathe.report",
        "lathe.search",
        "lathe_serving.client",
    },
    "jinja2": {"lathe_base.pages", "lathe_serving.gateway"},
    "cyclonedx": {"lathe.report.cards"},
    "packageurl": {"lathe.report.cards"},
    "tritonclient": {
        "lathe_serving",
        "lathe_serving.client",
        "lathe_serving.gateway",
        "lathe.release",
    },
    "grpc": {"lathe_serving", "lathe_serving.client", "lathe_serving.gateway", "lathe.release"},
    "httpx2": {"lathe_serving.client"},
    "aiohttp": {"lathe_serving.gateway"},
    "starlette": {"lathe_serving.gateway"},
    "uvicorn": {"lathe_serving.gateway"},
    "prometheus_client": {"lathe_serving.gateway"},
    "opentelemetry": {"lathe_serving.gateway"},
    "mlflow": {"lathe_base.tracking"},
    "model_registry": {"lathe_base.tracking"},
    "cryptography": {"lathe_base.provenance"},
    "in_toto_attestation": {"lathe_base.provenance"},
    "model_signing": {"lathe_base.provenance"},
    "securesystemslib": {"lathe_base.provenance"},
    "typer": {"lathe.cli", "lathe_launch.cluster", "lathe_paddle"},
}
"""Libraries that only these packages may import."""

SERVER = {"numpy", "onnxruntime", "tokenizers", "triton_python_backend_utils"}
"""Packages installed where a Triton backend runs."""

PACKAGES_OF = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio"}
"""Packages whose module has another name."""

NAMES: dict[str, Path] = {}
"""Source file by dotted module name."""
for _package in (*PACKAGES, *PIPELINES):
    for _path in sorted((ROOT / _package).rglob("*.py")):
        _parts = _path.relative_to(ROOT).with_suffix("").parts
        NAMES[".".join(_parts[:-1] if _parts[-1] == "__init__" else _parts)] = _path


@cache
def imported(path: Path, at_import: bool = False) -> list[str]:
    """Modules that a file imports; with `at_import`, only top-level imports."""
    return list(_imports(path, at_import))


def _imports(path: Path, at_import: bool) -> Iterator[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    nodes = body if at_import else [inner for node in body for inner in ast.walk(node)]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ([name for name in inside if name in NAMES] or [node.module])


ROOMS = sorted(set[str]().union(*LAYERS), key=len, reverse=True)


def room(module: str) -> str:
    """Room of a module: the longest listed name that contains it."""
    return next((name for name in ROOMS if f"{module}.".startswith(f"{name}.")), module)


def folder(module: str) -> str:
    """Folder of a module as a visitor of the repository sees it, one level below the package's."""
    first, *rest = module.split(".")
    return f"{first}/{rest[0]}" if rest and (ROOT / first / rest[0]).is_dir() else first


def is_marker(module: str) -> bool:
    """Whether a module is a package's own file, which holds its version at most."""
    return module in (*PACKAGES, *PIPELINES)


def reached(names: list[str]) -> dict[str, set[str]]:
    """Our modules loaded by importing `names`, with the libraries that each needs."""
    found, seen = set(names), dict[str, set[str]]()
    while waiting := found - seen.keys():
        name = waiting.pop()
        others = set(imported(NAMES[name], at_import=True))
        found |= others & NAMES.keys()
        seen[name] = {other.split(".")[0] for other in others} - set(PACKAGES)
    return seen


def circle(key: Callable[[str], str]) -> list[str]:
    """A circle of imports between groups of modules; empty if there is none."""
    graph = defaultdict[str, set[str]](set)
    for own, path in NAMES.items():
        for name in imported(path):
            if name in NAMES and not is_marker(name) and key(name) != key(own):
                graph[key(own)].add(key(name))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_place() -> None:
    found = {room(name) for name in NAMES if name.split(".")[0] in PACKAGES}
    assert found - set(PACKAGES) == set().union(*LAYERS) - set(PACKAGES)


def test_a_visitor_finds_at_most_twelve_rooms() -> None:
    for package in PACKAGES:
        folders = {folder(name) for name in NAMES if name.split(".")[0] == package} - {package}
        assert len(folders) <= 12


def test_imports_follow_the_floor_plan() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        f"{own} imports {name}"
        for own, path in NAMES.items()
        if room(own) in rank
        for name in imported(path)
        if name in NAMES and not is_marker(name) and room(name) != room(own)
        if rank.get(room(name), len(rank)) >= rank[room(own)]
    ]
    assert not wrong


def test_there_are_no_circles() -> None:
    assert circle(folder) == []
    assert circle(lambda module: module) == []


def test_a_library_is_imported_where_it_belongs() -> None:
    wrong = [
        f"{own} imports {name}"
        for own, path in NAMES.items()
        if own.split(".")[0] in PACKAGES
        for name in imported(path)
        if (rooms := LIBRARIES.get(name.split(".")[0])) is not None
        if not any(
            f"{own}.".startswith(f"{place}.") and len(place) >= len(room(own)) for place in rooms
        )
    ]
    assert not wrong


def test_the_server_needs_only_what_its_environment_has() -> None:
    modules = reached(["lathe_serving.backend", "lathe_serving.score_backend"])
    assert "lathe_serving.runtime.session" in modules
    assert set().union(*modules.values()) <= SERVER | sys.stdlib_module_names


def test_the_gateway_needs_only_what_its_environment_has() -> None:
    """The environment may be that of NVIDIA's Triton, with few extra packages."""
    modules = reached([name for name in NAMES if name.startswith("lathe_serving.gateway")])
    assert "lathe_serving.client.grpc_transport" in modules
    needed = set().union(*modules.values()) - sys.stdlib_module_names
    lock = (ROOT / "images" / "serve" / "cuda.lock").read_text(encoding="utf-8")
    packages = {PACKAGES_OF.get(name, name).replace("_", "-") for name in needed}
    assert {name for name in packages if f"\n{name}==" not in lock} == set()


def test_the_environment_of_paddle_needs_no_torch() -> None:
    modules = reached([name for name in NAMES if name.startswith("lathe_paddle")])
    assert "lathe.compress.plan" in modules
    assert "torch" not in set().union(*modules.values())


def test_the_command_line_starts_without_what_is_slow_to_import() -> None:
    needed = reached([name for name in NAMES if name.startswith("lathe.cli")]).values()
    assert set().union(*needed) <= {"rich", "typer"} | sys.stdlib_module_names
