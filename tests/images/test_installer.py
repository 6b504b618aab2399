"""The installer on a small checkout, with the real uv and pip and package indexes on loopback."""

import base64
import functools
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.loopback import LoopbackServer, QuietHandler
from tests.support.tables import quick_only
from tests.support.tls import certificate

ROOT = Path(__file__).parents[2]
SILENCE = 5.0  # seconds that the installer waits for an index


def wheel(folder: Path, name: str, version: str, binary: Path | None = None) -> str:
    """Write a wheel with an empty package or one program; returns its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    package = f"{name}-{version}.data/scripts/{name}" if binary else f"{name}/__init__.py"
    contents = {
        package: binary.read_bytes() if binary else f"version = {version!r}\n".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Index(QuietHandler):
    """Package index of the wheels in a folder, which also acts as a proxy for any host."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = unquote(urlsplit(self.path).path).strip("/").rpartition("/")[2]
        wheels = sorted(path.name for path in self.folder.glob(f"{name}-*.whl"))
        if name.endswith(".whl") and (self.folder / name).is_file():
            return self.reply((self.folder / name).read_bytes())
        if not wheels:
            return self.send_error(404)
        links = "".join(f'<a href="/files/{wheel}">{wheel}</a>' for wheel in wheels)
        page = f"<!DOCTYPE html><html><body>{links}</body></html>"
        self.reply(page.encode(), headers={"Content-Type": "text/html"})


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Write wheels to `pypi` (CUDA torch) and `cpu` (CPU torch); returns SHA-256 by name."""
    pypi, cpu = tmp_path / "pypi", tmp_path / "cpu"
    return {
        "small": wheel(pypi, "small", "1.0"),
        "torch": wheel(pypi, "torch", "2.13.0"),
        "torch+cpu": wheel(cpu, "torch", "2.13.0+cpu"),
    }


@pytest.fixture
def pypi(tmp_path: Path, folders: dict[str, str]) -> Iterator[str]:
    yield from serve(tmp_path / "pypi")


@pytest.fixture
def cpu_index(tmp_path: Path, folders: dict[str, str]) -> Iterator[str]:
    yield from serve(tmp_path / "cpu")


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of an index that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/simple"


def serve(folder: Path, certificate: Path | None = None) -> Iterator[str]:
    with LoopbackServer(functools.partial(Index, folder), certificate) as server:  # type: ignore[arg-type]
        yield f"{server.url}/simple"


@pytest.fixture
def checkout(tmp_path: Path, folders: dict[str, str]) -> Path:
    """A checkout with the installer and lock files that pin the test's wheels."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "images" / "installer", folder / "images" / "installer")
    shutil.copy(ROOT / "images" / "lathe", folder / "images")
    small = pin("small==1.0", folders["small"])
    locks = {
        "images/train/requirements.lock": pin("torch==2.13.0+cpu", folders["torch+cpu"]) + small,
        "images/train/cuda.lock": pin("torch==2.13.0", folders["torch"]) + small,
        "images/serve/requirements.lock": small,
        "images/serve-vllm/requirements.lock": small,
        "images/serve-vllm/cuda.lock": pin("torch==2.13.0", folders["torch"]),
        "requirements-dev.lock": small,
    }
    for name, text in locks.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def pin(requirement: str, digest: str) -> str:
    return f"{requirement} \\\n    --hash=sha256:{digest}\n"


class Machine:
    """Runs the installer with the test's own settings of pip and uv."""

    def __init__(self, checkout: Path, pypi: str) -> None:
        self.checkout = checkout
        self.bin = checkout.parent / "bin"
        self.bin.mkdir()
        (self.bin / "uv").symlink_to(Path(sys.executable).with_name("uv"))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON"))}
        self.environment = kept | {
            "HOME": str(checkout.parent),
            "XDG_CONFIG_HOME": str(checkout.parent / "config"),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "PIP_INDEX_URL": pypi,
            "TORCH_INDEX": "http://127.0.0.1:9/simple",  # connection refused
            "UV_HTTP_RETRIES": "0",
            "NO_COLOR": "1",
        }

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python_with_pip(), self.checkout / "images" / "installer", *arguments],
            env=self.environment | variables,
            capture_output=True,
            text=True,
        )

    def build(self, **variables: str) -> str:
        """Build the environment `train`; returns its version of torch."""
        done = self.run("train", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.torch()

    def torch(self) -> str:
        asked = [self.checkout / ".venv/bin/python", "-c", "import torch; print(torch.version)"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def python_with_pip() -> str:
    """Base interpreter of this environment, which itself has no pip."""
    return str(Path(sys.base_prefix) / "bin" / "python3")


@pytest.fixture
def machine(checkout: Path, pypi: str) -> Machine:
    return Machine(checkout, pypi)


CPU, CUDA = "2.13.0+cpu", "2.13.0"


def test_an_index_without_the_cpu_build_gives_the_one_for_cuda_and_says_so(
    machine: Machine,
) -> None:
    done = machine.run("train")
    assert machine.torch() == CUDA
    first = done.stdout.splitlines()[0]
    assert "CPU build of PyTorch: http://127.0.0.1:9/simple does not answer" in first
    assert "larger" in first


@pytest.mark.slow
def test_an_index_that_never_answers_is_given_up_in_five_seconds(
    machine: Machine, silent: str
) -> None:
    began = time.monotonic()
    done = machine.run("train", "serve", TORCH_INDEX=silent)
    assert machine.torch() == CUDA and f"{silent} does not answer" in done.stdout
    assert time.monotonic() - began < 4 * SILENCE  # pip would retry for minutes


def test_the_index_of_cpu_builds_is_asked_where_the_others_have_none(
    machine: Machine, cpu_index: str
) -> None:
    assert machine.build(TORCH_INDEX=cpu_index) == CPU


@pytest.mark.parametrize(
    "variable", quick_only(["PIP_FIND_LINKS", "UV_FIND_LINKS"], ["PIP_FIND_LINKS"])
)
def test_a_folder_of_wheels(machine: Machine, variable: str, tmp_path: Path) -> None:
    absent = f"{tmp_path}/absent " if variable.startswith("PIP") else ""
    assert machine.build(**{variable: f"{absent}{tmp_path}/cpu"}) == CPU


@pytest.mark.slow  # that of a configuration file is quick
@pytest.mark.parametrize("variable", ["PIP_EXTRA_INDEX_URL", "UV_INDEX"])
def test_an_extra_index(machine: Machine, variable: str, cpu_index: str) -> None:
    assert machine.build(**{variable: cpu_index}) == CPU


@pytest.mark.parametrize("section", quick_only(["global", "install"], ["global"]))
def test_pip_s_configuration_file(machine: Machine, section: str, cpu_index: str) -> None:
    folder = Path(machine.environment["XDG_CONFIG_HOME"], "pip")
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(
        f"[{section}]\nindex-url = {machine.environment.pop('PIP_INDEX_URL')}\n"
        f"extra-index-url =\n    {cpu_index}\n"
    )
    assert machine.build() == CPU


def test_uv_s_own_settings_come_before_pip_s(machine: Machine, pypi: str) -> None:
    assert machine.build(UV_DEFAULT_INDEX=pypi, PIP_INDEX_URL="http://127.0.0.1:9/simple") == CUDA


@pytest.mark.slow
def test_a_proxy_of_pip(machine: Machine, pypi: str) -> None:
    index, proxy = "http://packages.example/simple", pypi.removesuffix("/simple")
    assert machine.build(PIP_INDEX_URL=index, PIP_PROXY=proxy) == CUDA


@pytest.mark.slow
def test_an_authority_that_only_pip_knows(machine: Machine, tmp_path: Path) -> None:
    server, authority = certificate(tmp_path)
    for index in serve(tmp_path / "pypi", server):
        assert machine.build(PIP_INDEX_URL=index, PIP_CERT=str(authority)) == CUDA


@pytest.mark.slow
def test_an_extra_index_that_never_answers_is_left_out_without_its_password(
    machine: Machine, silent: str
) -> None:
    secret = silent.replace("//", "//user:password@")
    done = machine.run("serve", PIP_EXTRA_INDEX_URL=secret)
    assert done.returncode == 0, done.stderr
    assert f"{silent} does not answer" in done.stdout
    assert "password" not in done.stdout + done.stderr


def test_an_unavailable_flavour_leaves_no_environment(machine: Machine) -> None:
    done = machine.run("--flavour=cpu", "train")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: cannot get the CPU build of PyTorch" in done.stderr
    assert "hint: set TORCH_INDEX to an index" in done.stderr
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.slow
def test_a_machine_with_a_gpu_gets_cuda_by_default(machine: Machine, cpu_index: str) -> None:
    smi = machine.bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n")
    smi.chmod(0o755)
    assert machine.build(TORCH_INDEX=cpu_index) == CUDA
    machine.run("--flavour=cpu", "train", TORCH_INDEX=cpu_index)
    assert machine.torch() == CPU
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (machine.checkout / ".venv" / ".train").unlink()
    shutil.rmtree(machine.checkout / ".venv")
    assert machine.build(TORCH_INDEX=cpu_index) == CPU


@pytest.mark.slow
def test_vllm_is_built_for_the_machines_gpu(machine: Machine) -> None:
    found = []
    for arguments in ((), ("--flavour=cuda",)):
        assert machine.run("vllm", *arguments).returncode == 0
        packages = next(machine.checkout.glob(".venv-vllm/lib/python3*/site-packages"))
        found.append((packages / "torch").exists())
    assert found == [False, True]


@pytest.mark.slow
def test_pip_is_the_fallback_without_uv(machine: Machine, cpu_index: str) -> None:
    (machine.bin / "uv").unlink()
    done = machine.run("train", TORCH_INDEX=cpu_index)
    assert "cannot install uv from the package index" in done.stdout, done.stderr
    assert machine.torch() == CPU
    done = machine.run("--flavour=cuda", "--installer=pip", "train")
    assert machine.torch() == CUDA


@pytest.mark.slow
def test_uv_comes_from_the_package_index(machine: Machine, tmp_path: Path) -> None:
    binary = (machine.bin / "uv").resolve()
    (machine.bin / "uv").unlink()
    digest = wheel(tmp_path / "pypi", "uv", "0.13.9", binary)
    lock = machine.checkout / "images" / "installer" / "uv.lock"
    lock.write_text(pin("uv==0.13.9", digest))
    assert machine.build() == CUDA
    assert (machine.checkout / ".uv" / "bin" / "uv").is_file()
    assert not (machine.checkout / ".venv" / "bin" / "uv").exists()


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_when_its_lock_file_changes(
    machine: Machine,
) -> None:
    machine.build()
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    again = machine.run("train", **offline)
    assert (again.returncode, again.stdout) == (0, "")
    lock = machine.checkout / "images" / "train" / "cuda.lock"
    lock.write_text(lock.read_text().partition("small")[0])
    machine.build()
    packages = next(machine.checkout.glob(".venv/lib/python3*/site-packages"))
    assert not (packages / "small").exists()  # exactly what the lock file lists


@pytest.mark.slow
def test_an_interrupted_installation_starts_over(machine: Machine) -> None:
    cut = machine.run("train", UV_DEFAULT_INDEX="http://127.0.0.1:9/simple")
    assert cut.returncode == 1 and "127.0.0.1:9" in cut.stderr and "hint:" in cut.stderr
    assert (machine.checkout / ".venv" / ".train").read_text() == ""
    assert machine.build() == CUDA


def test_somebody_else_s_folder_is_left_alone(machine: Machine) -> None:
    theirs = machine.checkout / ".venv" / "notes.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    done = machine.run("train")
    assert done.returncode == 1 and f"{theirs.parent} was not made by" in done.stderr
    assert theirs.read_text() == "mine"


@pytest.mark.slow
def test_the_environment_of_another_checkout_is_left_alone(
    machine: Machine, tmp_path: Path
) -> None:
    """Its stamp names that checkout: it would be made again, and so emptied first."""
    machine.build()
    theirs = machine.checkout / ".venv"
    theirs.rename(tmp_path / "theirs")
    theirs.symlink_to(tmp_path / "theirs")
    (theirs / ".train").write_text("of another checkout")
    done = machine.run("dev")
    assert done.returncode == 1 and f"{theirs} is a link to {tmp_path}" in done.stderr
    assert machine.torch() == CUDA


@pytest.mark.slow
def test_the_tools_of_the_tests_are_added_to_the_environment(machine: Machine) -> None:
    assert machine.run("dev").returncode == 0
    stamps = {path.name for path in (machine.checkout / ".venv").glob(".*")}
    assert {".train", ".dev"} <= stamps and machine.torch() == CUDA


def test_the_command_runs_this_checkout(machine: Machine) -> None:
    machine.build()
    package = machine.checkout / "lathe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("def main() -> int:\n    print(__file__)\n    return 3\n")
    script = machine.checkout / ".venv" / "bin" / "lathe"
    done = subprocess.run([script], capture_output=True, text=True, cwd="/")
    assert done.returncode == 3 and done.stdout.strip() == str(package / "cli.py")


@pytest.mark.slow
def test_an_image_gets_exactly_its_lock_file(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "opt"
    lock = machine.checkout / "images" / "train" / "requirements.lock"
    done = machine.run("--image", str(folder), str(lock))
    assert done.returncode == 1 and "FLAVOUR=cuda" in done.stderr and not folder.exists()
    done = machine.run("--image", str(folder), str(lock), PIP_FIND_LINKS=f"{tmp_path}/cpu")
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("lib/python3*/site-packages/torch/__pycache__/*.pyc"))
    assert not list(folder.glob("lib/python3*/site-packages/lathe.pth"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lock",
    [path.relative_to(ROOT).as_posix() for path in ROOT.glob("images/*/*.lock")]
    + ["requirements-dev.lock"],
)
def test_every_lock_file_resolves_on_arm(lock: str, tmp_path: Path) -> None:
    # paddlepaddle-gpu and CUDA 11 have no other wheels, and some packages of vLLM's neither.
    only_x86 = {"images/paddle/cuda.lock", "images/serve-vllm/requirements.lock"}
    text = (ROOT / lock).read_text()
    wanted = tmp_path / "requirements.txt"
    # Only PyTorch's index has the hash of the CPU build for Arm.
    wanted.write_text(
        re.sub(r"^torch==\S+\+cpu \\\n(    --hash=\S+(?: \\)?\n)+", "", text, flags=re.M)
    )
    command = [Path(sys.executable).with_name("uv"), "pip", "install", "--dry-run", "--no-deps"]
    command += [
        "--require-hashes",
        "--only-binary=:all:",
        "--no-binary=kfp-server-api",
        "--quiet",
        "--target",
        tmp_path,
    ]
    command += ["--python", sys.executable, "--python-platform", "aarch64-manylinux_2_35"]
    done = subprocess.run([*command, "-r", wanted], capture_output=True, text=True)
    if "Failed to fetch" in done.stderr:
        pytest.skip(f"packages cannot be downloaded: {done.stderr.strip()[-300:]}")
    assert (done.returncode == 0) == (lock not in only_x86), done.stderr
