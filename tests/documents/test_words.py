"""Unidiomatic phrases do not come back; CONTRIBUTING.md has the rules.

The list is short, so that nearly every match is wrong: rephrase the sentence.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documents.pages import ROOT, TEXTS, prose
from tests.support.sources import python_files

PHRASES = [
    re.compile(rf"{phrase}\b")  # each begins with text, which Python finds 20 times as fast
    for phrase in (
        *("nats a token", "tokens? a second", "one a token"),  # per token, per second
        *("in a circle", "mend (?:it|the|your)", "provably", "in vain", "talkative"),
        *("without a meaning", "as ever", "at hand"),
        *("to the same bits", "goes on (?:to|with|from)"),
        *("are told (?:of|apart)", "is told (?:of|apart)", "has not the", "may not ask"),
        "is no (?:name|file|folder|address|number|text|list|object|token|model|mapping|digest)",
        *("made anew", "that there (?:is|are) not", "half written"),
        *("otherwise than", "passed over", "beside other work", "again and again"),
        *(
            rf"{what} an? (?:GPU|step|process|line|second)"
            for what in ("GB", "documents?", "objects?", "envelopes?", "micro-batches")
        ),
        *("is asked for", "are asked for", "OpenAI's interface"),
    )
]
NAMES = re.compile(
    r"_*(?:MOST|LEAST|LONGEST|SHORTEST)(?:_\w+)?"  # MAX_ and MIN_, with a unit
    r"|(?!(?:one|type|shape|index|best)_of)[a-z]\w*_of"  # a noun phrase or a verb
)
OPENINGS = re.compile(r"(?:Of|Those|That|What \w+ (?:gives|says|has|takes)) ")


def code() -> list[Path]:
    """Python files whose messages and docstrings users or contributors read."""
    paths = [*python_files(), *python_files("images", "benchmarks", "tests")]
    return [path for path in paths if path != Path(__file__)]  # which quotes the phrases


def phrases(text: str) -> list[str]:
    """The unidiomatic phrases in a text."""
    found = [match for phrase in PHRASES for match in phrase.finditer(text)]
    return [match[0] for match in found if not text[match.start() - 1 : match.start()].isalnum()]


def plain(text: str) -> str:
    """Join a text to one line, without the quotes between parts of a string."""
    return re.sub(r"\"\s+f?\"|\s+", " ", text)


@cache
def identifiers(path: Path) -> set[str]:
    """Names in a Python file, also those in strings."""
    return set(re.findall(r"\b[^\W\d]\w*", path.read_text(encoding="utf-8")))


def words(name: str) -> str:
    """The words of a name: `is_no_file` and `IsNoFile` are `is no file`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).lower()


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "CHANGELOG.md"])
def test_pages_are_in_plain_words(page: str) -> None:
    found = phrases(plain(prose(TEXTS[page])))
    assert not found, f"{page}: {found}"


def test_code_is_in_plain_words() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in code()
        if (wrong := phrases(plain(path.read_text(encoding="utf-8"))))
    }
    assert not found


def test_identifiers_are_in_plain_words() -> None:
    names = sorted(set().union(*map(identifiers, code())))
    assert not phrases("\n".join(map(words, names)))


def test_limits_and_functions_have_plain_names() -> None:
    private = {
        str(path.relative_to(ROOT)): names
        for path in code()
        if (names := sorted(filter(NAMES.fullmatch, identifiers(path))))
    }
    assert not private


def docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> list[str]:
    """Docstrings of a node and of its variables."""
    values = [line.value for line in node.body if isinstance(line, ast.Expr)]
    return [x.value for x in values if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def test_docstrings_say_what_a_thing_is() -> None:
    found = []
    for path in code():
        source = path.read_text(encoding="utf-8")
        if not re.search(rf"[\"']\s*{OPENINGS.pattern}", source):
            continue  # nothing to parse for
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for text in docstrings(node):
                    if OPENINGS.match(text):
                        found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found
