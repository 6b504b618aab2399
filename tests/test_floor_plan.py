"""Allowed imports between packages of `lathe`, and third-party libraries of each environment."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LATHE = Path(__file__).resolve().parents[1] / "lathe"

LAYERS = (
    {"errors"},
    {"console", "progress", "inputs"},
    {"config", "storage", "serve.runtime", "report.pages"},
    {"storage.artifacts", "production.tracking"},
    {"provenance"},
    {"data", "serve"},
    {"model", "serve.client"},
    {"train", "export", "serve.gateway", "serve.async_client"},
    {"launch", "evaluate"},
    {"compress"},
    {"backends", "report"},
    {"production", "search", "trial"},
    {"cli"},
    {"backends.paddle", "__main__"},
)
"""A package may import from layers above its own, but not from its own layer or those below; a
subpackage that is listed separately has its own layer."""

LIBRARIES = {
    "torch": {
        *{"model", "train", "export", "evaluate", "compress", "launch", "cli", "production"},
        *{"search", "trial"},
    },
    "paddle": {"backends.paddle"},
    "paddleslim": {"backends.paddle"},
    "paddle2onnx": {"backends.paddle"},
    "kfp": set[str](),
    "kubernetes": {"launch.cluster"},
    "kubeflow_trainer_api": {"launch.cluster"},
    "gguf": {"model", "export"},
    "pyarrow": {"data"},
    "onnxruntime": {"serve.runtime", "export", "backends.paddle"},
    "onnx": {"export", "backends.paddle", "serve.runtime", "production.certify"},
    "openvino": {"serve.runtime", "export"},
    "openvino_tokenizers": {"export"},
    "transformers": {"export"},
    "llguidance": {"serve.runtime"},
    "minio": {"storage"},
    "tenacity": {"storage", "launch"},
    "urllib3": {"storage", "launch"},
    "matplotlib": {"report.pages", "compress", "report", "search", "serve.client"},
    "jinja2": {"report.pages", "serve.gateway"},
    "cyclonedx": {"report.cards"},
    "packageurl": {"report.cards"},
    "tritonclient": {"serve", "serve.client", "serve.gateway", "production"},
    "grpc": {"serve", "serve.client", "serve.gateway", "production"},
    "httpx2": {"serve.client"},
    "aiohttp": {"serve.gateway"},
    "starlette": {"serve.gateway"},
    "uvicorn": {"serve.gateway"},
    "prometheus_client": {"serve.gateway"},
    "mlflow": {"production.tracking"},
    "model_registry": {"production.tracking"},
    "cryptography": {"provenance"},
    "in_toto_attestation": {"provenance"},
    "model_signing": {"provenance"},
    "securesystemslib": {"provenance"},
    "typer": {"cli", "launch", "backends.paddle"},
}
"""Libraries that only these packages may import."""

SERVER = {"numpy", "onnxruntime", "tokenizers", "triton_python_backend_utils"}
"""Packages installed where a Triton backend runs."""

PACKAGES = {"google": "protobuf", "grpc": "grpcio"}
"""Packages whose module has another name."""

CLI = [f"cli/{path.name}" for path in (LATHE / "cli").glob("*.py")]


def name_of(path: Path) -> str:
    """Dotted module name of a file."""
    parts = path.relative_to(LATHE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in sorted(LATHE.rglob("*.py"))}


def imported(path: Path, at_import: bool = False) -> Iterator[str]:
    """Yield modules that a file imports; with `at_import`, only top-level imports."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    nodes = body if at_import else [inner for node in body for inner in ast.walk(node)]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ([name for name in inside if name in NAMES] or [node.module])


PLACES = sorted(set[str]().union(*LAYERS), key=len, reverse=True)


def package(module: str) -> str:
    """Layer entry of a module: the longest listed name that contains it."""
    path = module.removeprefix("lathe.")
    return next((name for name in PLACES if f"{path}.".startswith(f"{name}.")), path)


def reached(files: list[str]) -> dict[str, set[str]]:
    """Modules of `lathe` loaded by importing `files`, with the libraries that each needs."""
    found, seen = {name_of(LATHE / file) for file in files}, dict[str, set[str]]()
    while waiting := found - seen.keys():
        name = waiting.pop()
        others = set(imported(NAMES[name], at_import=True))
        found |= {other for other in others if other.startswith("lathe.")}
        seen[name] = {other.split(".")[0] for other in others} - {"lathe"}
    return seen


def test_every_package_has_its_place() -> None:
    assert {package(name) for name in NAMES if name != "lathe"} == set().union(*LAYERS)


def test_imports_follow_the_floor_plan() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        f"{own} imports {name}"
        for own, path in NAMES.items()
        for name in imported(path)
        if name.startswith("lathe.")
        and package(name) != package(own)
        and rank[package(name)] >= rank[package(own)]
    ]
    assert not wrong


def test_a_library_is_imported_where_it_belongs() -> None:
    wrong = [
        f"{own} imports {name}"
        for own, path in NAMES.items()
        for name in imported(path)
        if (rooms := LIBRARIES.get(name.split(".")[0])) is not None
        if not any(
            f"{own}.".startswith(f"lathe.{room}.") and len(room) >= len(package(own))
            for room in rooms
        )
    ]
    assert not wrong


def test_the_server_needs_only_what_its_environment_has() -> None:
    modules = reached(["serve/backend.py", "serve/score_backend.py"])
    assert "lathe_serving.runtime.session" in modules
    assert set().union(*modules.values()) <= SERVER | sys.stdlib_module_names


def test_the_gateway_needs_only_what_its_environment_has() -> None:
    """The environment may be that of NVIDIA's Triton, with few extra packages."""
    modules = reached(
        [f"serve/gateway/{path.name}" for path in (LATHE / "serve" / "gateway").glob("*.py")]
    )
    assert "lathe_serving.client.grpc_messages" in modules
    needed = set().union(*modules.values()) - sys.stdlib_module_names
    lock = (LATHE.parent / "images" / "serve" / "cuda.lock").read_text(encoding="utf-8")
    packages = {PACKAGES.get(name, name).replace("_", "-") for name in needed}
    assert {name for name in packages if f"\n{name}==" not in lock} == set()


def test_the_environment_of_paddle_needs_no_torch() -> None:
    modules = reached(
        [f"backends/paddle/{path.name}" for path in (LATHE / "backends" / "paddle").glob("*.py")]
    )
    assert "lathe.compress.plan" in modules
    assert "torch" not in set().union(*modules.values())


def test_the_command_line_starts_without_what_is_slow_to_import() -> None:
    needed = set().union(*reached(["cli/__init__.py", *CLI]).values())
    assert needed <= {"rich", "typer"} | sys.stdlib_module_names
