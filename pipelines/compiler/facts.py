"""Extracts the imports, definitions and names of a Python file from its syntax, without running
it."""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from lathe_base.storage import atomic_file
from lathe_base.storage.verified import cache_folder

FORMAT = 1
"""Version of the format; increment it when this module's analysis changes."""

PLACES = re.compile(r"\b(?:lathe\w*|components)(?:\.\w+)+")
REGISTERED = ("dsl.component",)
"""Decorators that register a function, so that it is called without its name being mentioned."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Unit(BaseModel):
    """A top-level function or class, or, with an empty name, the code that runs on import.

    Attributes:
        imports: dotted names of imported modules and their members.
        mentions: identifiers in its code: units that it may call, recipe groups that it may read.
        is_verb: whether it is a command of a CLI.
    """

    name: str
    is_verb: bool = False
    imports: set[str] = set()
    mentions: set[str] = set()


class Facts(BaseModel):
    """The facts about one file.

    Attributes:
        digest: hash of its syntax tree, which has docstrings but no comments or layout.
    """

    digest: str
    units: list[Unit]


def extract_facts(source: bytes) -> Facts:
    """Extract the facts about a Python file."""
    tree = ast.parse(source)
    top, units = Unit(name=""), []
    for node in tree.body:
        if isinstance(node, Definition):
            calls = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
            is_verb = any(isinstance(c, ast.Attribute) and c.attr == "command" for c in calls)
            units.append(Unit(name=node.name, is_verb=is_verb))
            _read(_parts(node, at_import=False), units[-1])
            _read(_parts(node, at_import=True), top)
        else:
            _read([node], top)
    text = ast.dump(tree, annotate_fields=False)
    return Facts(digest=hashlib.sha256(text.encode()).hexdigest(), units=[top, *units])


def _parts(node: Definition, at_import: bool) -> Iterator[ast.AST]:
    """The parts of a definition that run at import, or those that run when it is called."""
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            if isinstance(statement, Definition):
                yield from _parts(statement, at_import)
            elif at_import:
                yield statement
        yield from (*node.decorator_list, *node.bases, *node.keywords) if at_import else ()
    elif at_import:
        yield from (*node.decorator_list, node.args)
        if any(ast.unparse(d).startswith(REGISTERED) for d in node.decorator_list):
            yield ast.Name(node.name)
    else:
        yield from node.body


def _read(nodes: Iterable[ast.AST], unit: Unit) -> None:
    """Add the imports and mentions of these nodes and their descendants."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        waiting += ast.iter_child_nodes(node)
        _note(node, unit)


def _note(node: ast.AST, unit: Unit) -> None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            unit.mentions.add(name)
        case ast.Import(names=aliases):
            unit.imports |= {alias.name for alias in aliases}
        case ast.ImportFrom(module=str(module), level=0, names=aliases):
            unit.imports |= {module, *(f"{module}.{alias.name}" for alias in aliases)}
            unit.mentions |= {alias.name for alias in aliases}
        case ast.ImportFrom():
            raise ValueError("relative imports are not supported")
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            unit.mentions.add(name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            values = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            for flag, value in pairwise(values):
                if flag == "-m" and isinstance(value, str):
                    unit.imports |= {value, f"{value}.__main__"}
        case ast.Constant(value=str(text)):
            unit.imports |= set(PLACES.findall(text))
            if text.endswith(".py"):
                unit.imports.add(f".{text.removesuffix('.py')}")  # a file beside this one


class FactsCache:
    """Caches the facts about files, by content, in Lathe's cache folder."""

    def __init__(self) -> None:
        folder = cache_folder()
        version = f"{FORMAT}-{sys.version_info.major}.{sys.version_info.minor}"
        self._path = folder / f"facts-{version}.json" if folder else None
        self._known: dict[str, Facts] = {}
        self._used: dict[str, Facts] = {}
        with suppress(OSError, ValueError):
            if self._path:
                values = json.loads(self._path.read_bytes())
                self._known = {key: Facts.model_validate(value) for key, value in values.items()}

    def read(self, path: Path) -> Facts:
        """The facts about a file."""
        source = path.read_bytes()
        key = hashlib.sha256(source).hexdigest()
        self._used[key] = self._known.get(key) or extract_facts(source)
        return self._used[key]

    def save(self) -> None:
        """Replace the cache file's content by the facts that were read."""
        if self._path is None or self._used.keys() <= self._known.keys():
            return
        with suppress(OSError), atomic_file(self._path) as work:
            values = {key: facts.model_dump(mode="json") for key, facts in self._used.items()}
            work.write_text(json.dumps(values), encoding="utf-8")
