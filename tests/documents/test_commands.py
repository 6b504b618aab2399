"""Every command in the documents is valid for the command line, make or Python."""

import importlib.util
import re
import shutil
import subprocess
from functools import cache
from typing import Any, get_origin

import pytest
import typer
from typer.testing import CliRunner

from lathe.cli import app
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from pipelines.make import ALL, TARGETS, Make, require_known
from tests.documents.pages import ROOT, TEXTS, blocks, commands, inline

QUICK = {"recipe", "plan"}
"""Verbs that only read a recipe and print: their commands in the documents are run."""

Call = tuple[str, list[str]]
LATHE, MAKE, PYTHON = commands("lathe"), commands("make"), commands("python")
VERBS = set(re.findall(r"^## lathe (.+)$", TEXTS["docs/reference/cli.md"], re.M))


def named(calls: list[Call]) -> Any:
    ids = [f"{page}: {' '.join(words)}" for page, words in calls]
    return pytest.mark.parametrize(("page", "words"), calls, ids=ids)


@cache
def whole() -> Any:
    """The command line with all verbs."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """Parse a command line into the verb's command and its unconverted options by name.

    Raises:
        Exception: unknown verb or option, from the command line's parser.
    """
    command: Any = whole()
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    values, rest, _ = command.make_parser(typer.Context(command)).parse_args(words)
    assert not rest, f"unexpected arguments: {rest}"
    return command, values


@cache
def require_recipe(name: str, overrides: tuple[str, ...]) -> None:
    load_recipe(name, overrides)


@named([call for call in LATHE if call[1][0] != "--help"])
def test_lathe_knows_the_command(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, values = parse(words)
    is_name = " ".join(words) in VERBS  # a mention of a verb, without its options
    missing = {p.name for p in command.params if p.required and not values.get(p.name)}
    assert is_name or not missing
    monkeypatch.chdir(ROOT)
    default = next((p.default for p in command.params if p.name == "recipe"), "base")
    overrides = tuple(o for o in values.get("override") or [] if not o.startswith("Group."))
    recipe = values.get("recipe") or default
    if "_gpt_" in recipe:  # a file of PaddleFleetX, which tests/config/test_fleetx.py loads
        recipe = "base"
    require_recipe(recipe, overrides)


@named([call for call in LATHE if call[1][0] in QUICK and len(call[1]) > 1])
def test_a_quick_command_succeeds(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(word.isupper() for word in words):  # placeholders such as NAME or KEY
        pytest.skip("a template, not a command")
    if "--try" in words:
        pytest.skip("takes minutes; tests/plan covers it")
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))


@named(MAKE)
def test_make_knows_the_target_and_its_variables(page: str, words: list[str]) -> None:
    own, _, overrides = " ".join(words).partition(" -- ")
    targets = [word for word in own.split() if re.fullmatch(r"[a-z][a-z-]*", word)]
    assert targets and targets[0] in make_targets()
    keys = re.findall(r"-o (\S+)", overrides)
    require_recipe("tiny", tuple(key for key in keys if "..." not in key))


@named(list({words[0]: (page, words) for page, words in MAKE}.values()))
@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_would_run_it(page: str, words: list[str]) -> None:
    """One command of each target; tests/pipelines/test_makefile.py has what make passes on."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    is_name = len(words) == 1  # a mention of a target, without its variables
    assert done.returncode == 0 or (is_name and " needs " in done.stderr), done.stderr
    assert done.stdout.strip() or is_name


@named([call for call in MAKE if call[1][0] in ALL])
def test_the_target_takes_its_variables(page: str, words: list[str]) -> None:
    given = [word.replace("\\", r"\\").replace(" ", r"\ ") for word in words[1:] if "=" in word]
    make = Make(" ".join(["n", "--", *given]), {})
    require_known(make, [word for word in words if word in ALL])
    assert words[0] not in TARGETS or make.arguments(TARGETS[words[0]])


@named(PYTHON)
def test_python_finds_the_module_or_file(page: str, words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    elif not words[0].startswith("-"):
        source = (ROOT / words[0]).read_text()
        options = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert not {o for o in options if o not in source and o[2:].replace("-", "_") not in source}


@pytest.mark.parametrize("page", TEXTS)
def test_shell_and_python_blocks_parse(page: str) -> None:
    if shell := "\n".join(blocks(TEXTS[page], "sh")):
        done = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for block in blocks(TEXTS[page], "python"):
        compile(block, page, "exec", flags=2**13)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for module, names in re.findall(r"^from (\S+) import ([\w, ]+)$", block, re.M):
            found = importlib.import_module(module)
            assert all(hasattr(found, name.strip()) for name in names.split(",")), (module, names)


@pytest.mark.parametrize("page", sorted(TEXTS.keys() - {"docs/reference/fleetx.md"}))
def test_settings_exist(page: str) -> None:
    groups = "|".join(Recipe.model_fields)
    for code in inline(TEXTS[page]):
        if not (match := re.fullmatch(rf"((?:{groups})(?:\.[A-Za-z]\w*)+)(?:[:=].*)?", code)):
            continue
        model: Any = Recipe
        for key in match[1].split("."):
            if get_origin(model) is dict:  # Launch.steps has step names as keys
                break
            assert key in model.model_fields, f"{code}: no {key}"
            model = model.model_fields[key].annotation


def test_the_documents_have_commands_to_check() -> None:
    assert len(LATHE) >= 40 and len(MAKE) >= 30 and len(PYTHON) >= 5


def test_git_ignores_the_keys_that_documents_create() -> None:
    """Otherwise `git add` takes a private key, and every version is called dirty."""
    made = {
        path for text in TEXTS.values() for path in re.findall(r"^lathe keygen (\S+)", text, re.M)
    }
    made = {path for path in made if path.endswith(".pem")} | {"keys/accesskey", "build/kfp-token"}
    assert "signing.pem" in made
    command = [
        "git",
        "check-ignore",
        *made,
        *(f"{path[:-4]}.pub" for path in made if ".pem" in path),
    ]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert ignored == command[2:]
