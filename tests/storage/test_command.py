"""`python -m lathe_base.storage` in the serving environment, and its dependencies."""

import os
import subprocess
import sys
from pathlib import Path

from lathe_base.storage import upload, write_text
from tests.support import environments

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"torch", "numpy", "rich", "pydantic", "typer", "kubernetes"}


def command(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_imports_little() -> None:
    program = f"import lathe_base.storage, sys; print({NEEDS} & set(sys.modules))"
    assert command("-c", program).stdout == "set()\n"


def test_in_the_servers_environment(s3: str, tmp_path: Path) -> None:
    python = str(environments.require("serve"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.pbtxt").write_text("x")
    upload(tmp_path / "model", f"{s3}/release/")
    ended = command(
        "-m", "lathe_base.storage", "fetch", f"{s3}/release/", str(tmp_path / "out"), python=python
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out/config.pbtxt").read_text() == "x"


def test_put_and_errors(s3: str, tmp_path: Path) -> None:
    write_text(f"{s3}/f", "x")
    (tmp_path / "f").write_text("y")
    assert (
        command("-m", "lathe_base.storage", "put", str(tmp_path / "f"), f"{s3}/f").returncode == 0
    )
    ended = command("-m", "lathe_base.storage", "fetch", f"{s3}/f", str(tmp_path / "out"))
    assert Path(ended.stdout.strip()).read_text() == "y"
    ended = command("-m", "lathe_base.storage", "fetch", f"{s3}/nothing", str(tmp_path / "out"))
    assert ended.returncode == 2
    first, hint = ended.stderr.splitlines()
    assert first.startswith(f"error[not-found]: {s3}/nothing: ") and hint.startswith("  hint: ")
