"""The corpus that needs no download: the English prose that ships with CPython."""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from pydoc_data.topics import topics

# Not prose, not the library's own, or one line repeated a hundred times.
SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
    *("_bundled", "site-packages", "dist-packages", "__pycache__"),
}
MIN_CHARACTERS = 200
PROSE = re.compile(r"[\w\"'`(](?!\d*[.)]\s)")
HOLDS_DEFINITIONS = ast.stmt | ast.excepthandler | ast.match_case  # not expressions
WRAPPED = 50  # a shorter line ends where its author ended it


def python_documents() -> Iterator[str]:
    """Topics of the language reference, and the docstrings of the standard library.

    A document is one topic of `pydoc_data.topics`, or all docstrings of one module in source order.
    Docstrings repeated from an earlier module are dropped, and so are documents of less than 200
    characters. Paragraphs become one line each. About 430 documents and 2 MB with CPython 3.11; the
    text differs a little between Python versions. Files are read with `ast`, nothing is imported.
    The order is by digest of the name, the same everywhere: splits that are cut in order then hold
    topics and modules of all kinds, not the end of the alphabet.
    """
    library = Path(sysconfig.get_path("stdlib"))
    named = {text: f"topic {name}" for name, text in sorted(topics.items())}  # some share a text
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if SKIPPED.isdisjoint(parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            named["\n\n".join(fresh)] = "/".join(parts)
    for text in sorted(named, key=lambda text: hashlib.sha256(named[text].encode()).digest()):
        text = _unwrap(cleandoc(text))
        if len(text) >= MIN_CHARACTERS:
            yield text


def _unwrap(text: str) -> str:
    """Join the lines of hard-wrapped paragraphs; otherwise a small model mostly learns line breaks.

    A line is joined to the previous one if both read as prose and that one is long and equally
    indented; lists, tables, code and doctests are kept.
    """
    lines: list[str] = []
    before = ""
    for line in text.splitlines():
        bare = line.lstrip()
        same_indent = len(line) - len(bare) == len(before) - len(before.lstrip())
        prose = PROSE.match(bare) and PROSE.match(before.lstrip())
        if prose and same_indent and len(before.strip()) >= WRAPPED:
            lines[-1] = f"{lines[-1].rstrip()} {bare}"
        else:
            lines.append(line.rstrip())
        before = line
    return "\n".join(lines)


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        pending: list[ast.AST] = [ast.parse(path.read_bytes(), path.name)]
    while pending:
        node = pending.pop()
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield text
        children = reversed(list(ast.iter_child_nodes(node)))
        pending.extend(child for child in children if isinstance(child, HOLDS_DEFINITIONS))
