"""Text files are UTF-8 in any locale, and printing never fails on unencodable text."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support.sources import ROOT, python_files

# Its body is part of the compiled pipelines; it writes only ASCII.
IN_THE_GOLDEN_FILES = {ROOT / "components" / "release" / "component.py"}


def opens_text_without_encoding(call: ast.Call) -> bool:
    function = call.func
    if any(k.arg == "encoding" for k in call.keywords) or not isinstance(function, ast.Attribute):
        return False
    if ast.unparse(function.value) in ("storage", "os", "gzip", "lzma", "TokenDataset"):
        return False
    if function.attr == "read_text":
        return not call.args
    if function.attr == "write_text":
        return len(call.args) == 1
    mode = call.args[0] if call.args else None
    is_mode = isinstance(mode, ast.Constant) and mode.value in ("r", "w", "a", "x", "r+", "w+")
    return function.attr == "open" and is_mode


def test_every_text_file_is_opened_with_its_encoding() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        if path not in IN_THE_GOLDEN_FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_without_encoding(node)
    ]
    assert not found, f"without encoding=: {found}"


@pytest.mark.parametrize(
    "environment",
    [
        {"LANG": "C"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_printing_never_fails(environment: dict[str, str]) -> None:
    script = (
        "import sys; from lathe_base.console import print_any_text, show; print_any_text();"
        "show(prompt=sys.argv[1] + '\\ud800 \\xe9 \\xb1'); print(sys.argv[1], file=sys.stderr)"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
    ended = subprocess.run(
        [sys.executable, "-c", script, b"caf\xe9"],
        env=plain | environment,
        capture_output=True,
        check=True,
    )
    assert ended.stdout.startswith(b"prompt: caf\\udce9\\ud800 ")
    assert ended.stderr == b"caf\\udce9\n"


def test_a_prompt_that_is_not_utf_8_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "lathe", "generate", "no-model", b"caf\xe9"], capture_output=True
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error[malformed]: prompt caf\\udce9: not UTF-8\n  hint: ")
