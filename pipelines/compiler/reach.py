"""Finds the Lathe sources that a component's result depends on, and their digest.

The analysis is static. It follows imports from the component's function through all modules of
`SOURCES`; an import inside a function or class counts only if reached code mentions
that function or class. So `pretrain` does not depend on pruning, although one module imports both
on demand. A Python program that a module starts (`-m lathe`), a module named in a string and a file
beside a module count as imported. Of the CLI's commands, only the component's own counts: its
processes are started with no other.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lathe_base import PACKAGES
from lathe_base.config.settings import Recipe
from lathe_base.storage import sha256
from pipelines.compiler.facts import Facts, FactsCache, Unit

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (*PACKAGES, "components")
DYNAMIC = {"lathe.cli.app": "lathe.cli.", "lathe.export.formats.__init__": "lathe.export.formats."}
"""Modules that import all modules of a package by computed name -> prefix of those modules. A test
fails if one is missing here."""

FORMER_NAMES = "lathe.former_names"
"""A module that names others, and imports them only for a user's program."""

SETTINGS = "lathe_base.config."
"""Modules that mention every recipe group, which says nothing about what a step reads."""

RECIPES = "lathe_base/recipes"
"""Data that a step depends on only through its resolved recipe."""

DATA = {".j2", ".html", ".css", ".js", ".json", ".txt", ".yaml"}


@dataclass(frozen=True)
class Reached:
    """The dependencies of a component.

    Attributes:
        files: path relative to the repository -> digest.
        modules: modules that may be imported.
        groups: recipe groups that may be read.
    """

    files: Mapping[str, str]
    modules: frozenset[str]
    groups: frozenset[str]

    @property
    def digest(self) -> str:
        """Digest of all files and their names."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()


class Sources:
    """Lathe's sources in a folder."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self.root = root
        cache = FactsCache()
        self._paths: dict[str, Path] = {}
        for package in SOURCES:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                self._paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._facts = {name: cache.read(path) for name, path in self._paths.items()}
        cache.save()
        self._cache: dict[str, Reached] = {}

    def reached(self, component: str) -> Reached:
        """Dependencies of a component, given by the name of its folder."""
        if component not in self._cache:
            self._cache[component] = self._reached(component)
        return self._cache[component]

    def _reached(self, component: str) -> Reached:
        walk = _Walk(self._facts, component)
        walk.run(f"components.{component}.component")
        files = {self._name(self._paths[name]): self._facts[name].digest for name in walk.modules}
        for folder in {self._paths[name].parent for name in walk.modules}:
            files |= self._data.get(folder, {})
        groups = walk.mentioned_outside(SETTINGS) & Recipe.model_fields.keys()
        return Reached(files, frozenset(walk.modules), frozenset(groups))

    @cached_property
    def _data(self) -> dict[Path, dict[str, str]]:
        """Digests of package data such as templates, by folder."""
        reached: dict[Path, dict[str, str]] = {}
        for path in (path for package in SOURCES for path in (self.root / package).rglob("*")):
            if path.suffix in DATA and not self._name(path).startswith(RECIPES):
                folder = next(p for p in path.parents if (p / "__init__.py").exists())
                reached.setdefault(folder, {})[self._name(path)] = sha256(path)
        return reached

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class _Walk:
    """Follows imports and mentions until nothing new is reached.

    Args:
        verb: the only CLI command that the component's processes are started with.

    Attributes:
        modules: modules reached so far.
    """

    def __init__(self, facts: Mapping[str, Facts], verb: str) -> None:
        self.modules: set[str] = set()
        self._facts, self._verb = facts, verb
        self._runs: list[tuple[str, Unit]] = []
        self._unmentioned: dict[str, list[tuple[str, Unit]]] = {}
        self._mentioned: set[str] = set()
        self._named: set[str] = set()

    def run(self, module: str) -> None:
        """Reach everything that a module depends on."""
        self._add(module)
        for name, unit in self._runs:  # grows meanwhile
            for mention in unit.mentions - self._mentioned:
                self._mentioned.add(mention)
                self._runs += self._unmentioned.pop(mention, [])
            for imported in unit.imports if name != FORMER_NAMES else ():
                beside = name.rpartition(".")[0] if imported.startswith(".") else ""
                self._add(beside + imported)

    def mentioned_outside(self, prefix: str) -> set[str]:
        """Identifiers in the reached code, except in modules whose name starts with `prefix`."""
        units = (unit for module, unit in self._runs if not module.startswith(prefix))
        return {mention for unit in units for mention in unit.mentions}

    def _add(self, name: str) -> None:
        """Add a module and its parent packages; of a name within a module, that module."""
        if name in self._named:
            return
        self._named.add(name)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            if module in self._facts and module not in self.modules:
                self.modules.add(module)
                for unit in self._facts[module].units:
                    self._sort(module, unit)
                for other in self._facts if module in DYNAMIC else ():
                    if other.startswith(DYNAMIC[module]):
                        self._add(other)

    def _sort(self, module: str, unit: Unit) -> None:
        """Reach a unit that runs at import or has been mentioned; keep others until a mention."""
        is_meant = unit.name == self._verb if unit.is_verb else unit.name in self._mentioned
        if is_meant or not unit.name or unit.name.startswith("__"):
            self._runs.append((module, unit))
        elif not unit.is_verb:
            self._unmentioned.setdefault(unit.name, []).append((module, unit))
