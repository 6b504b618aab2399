"""The README's commands exist and do what they are named for."""

import re
import subprocess
from pathlib import Path

import pytest

from lathe.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
MAKE = [
    line.split("#")[0].strip()
    for block in SHELL
    for line in block.splitlines()
    if line.startswith("make ")
]


def test_make_test_runs_in_ci_as_the_readme_says() -> None:
    assert "make test" in MAKE and "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_the_command(command: str) -> None:
    dry = re.sub(r"\bmake (?=[a-z])", "make -n ", command)
    done = subprocess.run(["bash", "-c", dry], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_table_of_verbs_is_the_command_line() -> None:
    named = set()
    for cell in re.findall(r"^\| (`lathe .*?) \|", README, re.MULTILINE):
        named |= {verb.removeprefix("lathe ") for verb in re.findall(r"`(.*?)`", cell)}
    assert named == {
        (command.name or command.callback.__name__) for command in app.registered_commands
    }  # type: ignore[union-attr]


def test_the_folders_are_there() -> None:
    folders = re.findall(r"^\| `([a-z/]+)/` \|", README, re.MULTILINE)
    assert len(folders) >= 7
    assert not [folder for folder in folders if not (ROOT / folder).is_dir()]
