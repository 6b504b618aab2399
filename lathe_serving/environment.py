"""Find the environment that has tritonserver, and that in which its Python backend runs, and set up
what the binary needs to start."""

import json
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lathe_base.errors import Code, UserError

ROOT = Path(__file__).resolve().parents[1]  # what `import lathe_serving` needs on PYTHONPATH
PYTHON_VARIABLE = "LATHE_SERVE_PYTHON"
HINT = (
    f"run `make serve-env` in a checkout, or `pip install 'lathe[serve]'`, or set "
    f"{PYTHON_VARIABLE} "
    "to the interpreter of an environment with Triton"
)

VLLM_VARIABLE = "LATHE_VLLM_PYTHON"
VLLM_HINT = (
    f"run `make vllm-env` in a checkout, or set {VLLM_VARIABLE} to the interpreter of an "
    "environment with vLLM"
)

TRITON_OF_WHEEL = {"0.7.0": "2.51.0"}
VULNERABLE = {"2.51.0"}
"""Versions with published vulnerabilities, which `lathe audit` lists."""

RESTRICTED = "model-repository,shared-memory,trace,logging"
"""Triton endpoints that clients cannot access, over HTTP and gRPC."""

_DESCRIBE = """
import importlib.metadata, importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
gateway = ("aiohttp", "starlette", "uvicorn", "prometheus_client", "jinja2", "tritonclient", "yaml")
print(json.dumps({
    "pytriton": spec and spec.submodule_search_locations[0],
    "vllm": importlib.util.find_spec("vllm") is not None,
    "wheel": spec and importlib.metadata.version("nvidia-pytriton"),
    "site_packages": sysconfig.get_path("platlib"),
    "libraries": sysconfig.get_config_var("LIBDIR"),
    "version": f"{sys.version_info.major}.{sys.version_info.minor}",
    "missing": [name for name in gateway if importlib.util.find_spec(name) is None],
}))
"""


@dataclass(frozen=True)
class ServeEnvironment:
    """A Python environment with nvidia-pytriton, which contains the tritonserver binary."""

    python: Path
    tritonserver: Path  # the folder with bin/, backends/ and python_backend_stubs/
    site_packages: Path
    libraries: Path  # folder of libpython, if it is a shared library
    version: str  # Python's, as in the names of the stub folders
    missing: tuple[str, ...]  # packages of the gateway
    wheel: str  # version of nvidia-pytriton

    @property
    def triton(self) -> str:
        """Triton's version, if known."""
        return TRITON_OF_WHEEL.get(self.wheel, f"of nvidia-pytriton {self.wheel}")

    @property
    def binary(self) -> Path:
        """The tritonserver binary."""
        return self.tritonserver / "bin" / "tritonserver"

    def variables(self) -> dict[str, str]:
        """Environment variables of the server: its Python stub embeds an interpreter, which must
        find this environment's packages first, and lathe."""
        bundled = self.tritonserver.parents[1] / "nvidia_pytriton.libs"
        libraries = [str(self.libraries), str(bundled), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")},
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "PYTHONPATH": os.pathsep.join([str(self.site_packages), str(ROOT)]),
            # Write no bytecode: a model repository must not change.
            "PYTHONDONTWRITEBYTECODE": "1",
            # Decoding reads all weights for every token, which is 8 % faster with 2 MB pages.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        }

    def require_gateway(self) -> None:
        """Check that the gateway can run here.

        Raises:
            UserError: a package is missing.
        """
        if self.missing:
            raise UserError(
                f"{self.python}: {', '.join(self.missing)} not installed", HINT, Code.NOT_INSTALLED
            )

    def link_backends(self, folder: Path) -> Path:
        """Make `folder` a backend directory: Triton needs the stub of this Python version beside
        the backend's library, but the wheel has a separate folder of stubs for each version.

        Raises:
            UserError: a file exists where a link is needed.
        """
        backend = folder / "python"
        unlink_backends(folder)
        backend.mkdir(parents=True, exist_ok=True)
        source = self.tritonserver / "backends" / "python"
        stub = (
            self.tritonserver / "python_backend_stubs" / self.version / "triton_python_backend_stub"
        )
        for path in [*(p for p in source.iterdir() if p.is_file()), stub]:
            try:
                (backend / path.name).symlink_to(path)
            except FileExistsError:
                raise UserError(
                    f"{backend / path.name}: exists, but must be a link to {path}",
                    "move it away",
                    Code.EXISTS,
                ) from None
        return folder


def restrictions() -> list[str]:
    """Options that make tritonserver reject requests to `RESTRICTED` without a new key, which its
    command line shows, in the header `triton-admin` (HTTP) or `triton-grpc-protocol-triton-admin`
    (gRPC). The Deployment has the same, with a key from a Secret."""
    needed = f"{RESTRICTED}:triton-admin={secrets.token_hex(32)}"
    return [f"--http-restricted-api={needed}", f"--grpc-restricted-protocol={needed}"]


def unlink_backends(folder: Path) -> None:
    """Remove the links of `link_backends`, their bytecode, and the folders if they are then
    empty."""
    backend = folder / "python"
    if folder.is_symlink() or backend.is_symlink() or not backend.is_dir():
        return
    for link in backend.iterdir():
        if link.is_symlink() and "tritonserver" in link.readlink().parts:
            link.unlink()
            for compiled in (backend / "__pycache__").glob(f"{link.stem}.*.pyc"):
                compiled.unlink()
    with suppress(OSError):
        (backend / "__pycache__").rmdir()
    with suppress(OSError):
        backend.rmdir()
        folder.rmdir()


def find_environment() -> ServeEnvironment:
    """Find the environment of `LATHE_SERVE_PYTHON`, or `.venv-serve` beside the package; without
    either, use this process's own, to which `pip install 'lathe[serve]'` adds Triton.

    Raises:
        UserError: there is no such environment, or no tritonserver for its Python version.
    """
    beside = ROOT / ".venv-serve" / "bin" / "python"
    default = beside if beside.is_file() else sys.executable
    python = Path(os.environ.get(PYTHON_VARIABLE) or default)
    if not python.is_file():
        raise UserError(
            f"{python}: no such interpreter: Triton needs its own environment",
            HINT,
            Code.NOT_INSTALLED,
        )
    report = _described(python, HINT)
    if not report["pytriton"]:
        raise UserError(f"{python}: nvidia-pytriton is not installed", HINT, Code.NOT_INSTALLED)
    tritonserver = Path(report["pytriton"]) / "tritonserver"
    if not (tritonserver / "python_backend_stubs" / report["version"]).is_dir():
        raise UserError(
            f"{python}: Triton does not support Python {report['version']}",
            HINT,
            Code.WRONG_VERSION,
        )
    return ServeEnvironment(
        python,
        tritonserver,
        Path(report["site_packages"]),
        Path(report["libraries"]),
        report["version"],
        tuple(report["missing"]),
        report["wheel"],
    )


def vllm_python() -> Path:
    """The interpreter of `LATHE_VLLM_PYTHON`, or of `.venv-vllm` beside the package.

    Raises:
        UserError: there is none.
    """
    python = Path(os.environ.get(VLLM_VARIABLE) or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.is_file():
        raise UserError(
            f"{python}: no such interpreter: vLLM needs its own environment",
            VLLM_HINT,
            Code.NOT_INSTALLED,
        )
    return python


def with_vllm(environment: ServeEnvironment) -> ServeEnvironment:
    """The same Triton, with its Python backend in vLLM's environment.

    Raises:
        UserError: there is no such environment, or Triton does not support its Python.
    """
    python = vllm_python()
    report = _described(python, VLLM_HINT)
    if not report["vllm"]:
        raise UserError(f"{python}: vllm is not installed", VLLM_HINT, Code.NOT_INSTALLED)
    if not (environment.tritonserver / "python_backend_stubs" / report["version"]).is_dir():
        raise UserError(
            f"{python}: Triton does not support Python {report['version']}",
            VLLM_HINT,
            Code.WRONG_VERSION,
        )
    return replace(
        environment,
        python=python,
        site_packages=Path(report["site_packages"]),
        libraries=Path(report["libraries"]),
        version=report["version"],
    )


def _described(python: Path, hint: str) -> dict[str, Any]:
    run = subprocess.run(
        [python, "-c", _DESCRIBE],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if run.returncode:
        raise UserError(f"{python} failed to run: {run.stderr.strip()[-300:]}", hint, Code.FAILED)
    report: dict[str, Any] = json.loads(run.stdout)
    return report
