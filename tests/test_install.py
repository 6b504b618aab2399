"""`pip install` of the packages gives a working command line with all files that it reads."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.test_dependencies import DISTRIBUTIONS, ROOT, pins

PACKED_APART = {"README.md", "pyproject.toml"}
CORE = ("lathe_base", "lathe_launch", "lathe_serving", "lathe")
TEXT = "The cat sat on the mat, and the dog sat by the door.\n\n" * 2000
SMALL = [
    *("-o", "Prepare.vocab_size=300", "-o", "Data.Train.dataset.max_seq_len=16"),
    *("-o", "Model.num_layers=1", "-o", "Model.hidden_size=32"),
    *("-o", "Model.num_attention_heads=2", "-o", "Engine.max_steps=2"),
]
UNREACHABLE = ("No matching distribution found", "Could not fetch URL", "Connection refused")
"""Messages of pip if an index lacks a package or does not respond."""


def copied(folder: Path, *distributions: str) -> Path:
    """A copy of these in the checkout, since a build leaves files in its folder."""
    for distribution in distributions:
        for package in DISTRIBUTIONS[distribution]:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command isolated from this checkout and environment."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LATHE_"))}
    return subprocess.run(
        command, cwd=cwd, env=outside | {"COLUMNS": "100"}, capture_output=True, text=True
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_wheel_holds_every_file_of_its_packages(tmp_path: Path, distribution: str) -> None:
    source = copied(tmp_path / "source", distribution)
    files = {
        path.relative_to(source).as_posix()
        for package in DISTRIBUTIONS[distribution]
        for path in (source / package).rglob("*")
        if path.is_file() and path.name not in PACKED_APART
        if distribution != "." or path.suffix == ".py"
    }
    options = ("--wheel", "--no-build-isolation", "--python", sys.executable)
    uv = Path(sys.executable).with_name("uv")
    built = run(
        *(uv, "build", *options, "--out-dir", tmp_path, source / distribution), cwd=tmp_path
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files


@pytest.mark.slow
def test_a_verb_that_needs_an_extra_names_it(tmp_path: Path) -> None:
    start = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['kubernetes'] = None; "
        "from lathe.cli import main; sys.argv[1:] = ['release', 'list']; main()"
    )
    done = run(sys.executable, "-c", start, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "kubernetes is not installed" in done.stderr
    assert "pip install 'lathe[cluster]'" in done.stderr


@pytest.mark.long
def test_pip_install_gives_a_command_line_that_trains(tmp_path: Path) -> None:
    source, venv = copied(tmp_path / "source", *DISTRIBUTIONS), tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", venv, cwd=tmp_path).returncode == 0
    # Versions from the lock file, but the build of torch that is installed here.
    locked = pins(ROOT / "images/train/requirements.lock") | {"torch": metadata.version("torch")}
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in locked.items()))
    folders = [source / name for name in CORE]
    pip = (venv / "bin" / "python", "-m", "pip")
    made = run(*pip, "install", "--quiet", "--constraint", constraints, *folders, cwd=tmp_path)
    if made.returncode and (said := [s for s in UNREACHABLE if s in made.stderr]):
        pytest.skip(f"packages cannot be downloaded: {said[0]}: {made.stderr.strip()[-500:]}")
    assert made.returncode == 0, made.stderr
    assert (checked := run(*pip, "check", cwd=tmp_path)).returncode == 0, checked.stdout

    def lathe(*arguments: str) -> str:
        done = run(venv / "bin" / "lathe", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "prepare" in lathe("--help")
    assert "tiny" in lathe("recipe").splitlines()
    assert "max_steps: " in lathe("recipe", "tiny")
    (tmp_path / "corpus.txt").write_text(TEXT)
    assert "tokens: " in lathe("prepare", "--source", "corpus.txt", *SMALL)
    assert "steps: 2\n" in lathe("pretrain", *SMALL)
