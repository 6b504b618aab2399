"""Parses the repository's documents: commands, code and names in them."""

import re
import shlex
from collections.abc import Iterator

from tests.support.sources import PACKAGES, ROOT

PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "components").glob("*/README.md"),
        *(ROOT / package / "README.md" for package in PACKAGES),
        ROOT / "benchmarks" / "README.md",
    ]
)
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced code blocks in the given languages."""
    return [code for _, language, code in FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    """Text without fenced code blocks."""
    return FENCE.sub("", text)


def inline(text: str) -> list[str]:
    """Inline code (in backquotes) outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def lines(block: str) -> list[str]:
    """Commands in a shell block, without comments, with continued lines joined."""
    return [
        line.strip()
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Calls of a program in shell blocks and inline code as (page, arguments), without duplicates.

    Inline code counts as a call if it has an argument. The changelog is excluded, since it mentions
    commands that no longer exist.
    """
    found: dict[tuple[str, ...], str] = {}
    for page, text in TEXTS.items():
        if page == "CHANGELOG.md":
            continue
        shell = [line for block in blocks(text, "sh") for line in lines(block)]
        quoted = [code for code in inline(text) if re.match(rf"{re.escape(program)} \S", code)]
        for line in shell + quoted:
            for words in _calls(line, program):
                found.setdefault(tuple(words), page)
    return [(page, list(words)) for words, page in found.items()]


def _calls(line: str, program: str) -> Iterator[list[str]]:
    """Yield the calls of a program in a line, which may combine several by `&&`, `|` and `(`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[&|;()<>]+", word):
            words.append(word)
            continue
        while words and re.fullmatch(r"\w+=.*", words[0]):  # environment variables of the call
            words.pop(0)
        if words and words[0].removeprefix(".venv/bin/") == program:
            yield words[1:]
        words = words if word.startswith("<") else []
