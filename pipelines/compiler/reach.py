"""Finds the Lathe sources that a component's result depends on, and their digest.

Found without running anything. From the component's function, imports are followed through all
modules of `lathe` and `components`; an import inside a function or a class counts only where
something reached mentions that name. So `pretrain` does not depend on pruning, although the module
that imports either on demand is the same. A Python program that a module starts (`-m lathe`), a
module named in a string, and a file beside a module count as imported. Of a command line's verbs
only the component's own counts, which is what a component starts its processes with.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lathe.config.settings import Recipe
from lathe.storage import sha256
from pipelines.compiler.facts import Facts, Notes, Unit

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("lathe", "components")
DYNAMIC = {"lathe.cli.app": "lathe.cli.", "lathe.export.formats.__init__": "lathe.export.formats."}
"""Modules that import all modules of a package by computed names. Another one needs a line here,
and a test fails until it has one."""

SETTINGS = "lathe.config."
"""Modules that know every group of a recipe by name; steps are given the recipe that they read."""

RECIPES = "lathe/recipes"
"""Data that a step depends on by its resolved recipe only."""

DATA = {".j2", ".html", ".css", ".js", ".json", ".txt", ".yaml"}


@dataclass(frozen=True)
class Reached:
    """The dependencies of a component.

    Attributes:
        files: digests by path relative to the repository.
        modules: those that may be imported.
        groups: of the recipe.
    """

    files: Mapping[str, str]
    modules: frozenset[str]
    groups: frozenset[str]

    @property
    def digest(self) -> str:
        """Digest of all files and their names."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()


class Sources:
    """The sources of Lathe below a folder."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self.root = root
        notes = Notes()
        self._paths: dict[str, Path] = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                self._paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._facts = {name: notes.read(path) for name, path in self._paths.items()}
        notes.keep()
        self._found: dict[str, Reached] = {}

    def reached(self, component: str) -> Reached:
        """The dependencies of the component in the folder of this name."""
        if component not in self._found:
            self._found[component] = self._reached(component)
        return self._found[component]

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
        found: dict[Path, dict[str, str]] = {}
        for path in (self.root / "lathe").rglob("*"):
            if path.suffix in DATA and not self._name(path).startswith(RECIPES):
                folder = next(p for p in path.parents if (p / "__init__.py").exists())
                found.setdefault(folder, {})[self._name(path)] = sha256(path)
        return found

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class _Walk:
    """Follows imports and mentions until nothing new is reached.

    Args:
        verb: the only command that processes of the component are started with.

    Attributes:
        modules: reached so far.
    """

    def __init__(self, facts: Mapping[str, Facts], verb: str) -> None:
        self.modules: set[str] = set()
        self._facts, self._verb = facts, verb
        self._runs: list[tuple[str, Unit]] = []
        self._asleep: dict[str, list[tuple[str, Unit]]] = {}
        self._mentioned: set[str] = set()
        self._named: set[str] = set()

    def run(self, module: str) -> None:
        """Reach everything from a module."""
        self._add(module)
        for name, unit in self._runs:  # which grows
            for mention in unit.mentions - self._mentioned:
                self._mentioned.add(mention)
                self._runs += self._asleep.pop(mention, [])
            for imported in unit.imports:
                beside = name.rpartition(".")[0] if imported.startswith(".") else ""
                self._add(beside + imported)

    def mentioned_outside(self, prefix: str) -> set[str]:
        """The identifiers in what is reached of modules whose name does not begin so."""
        units = (unit for module, unit in self._runs if not module.startswith(prefix))
        return {mention for unit in units for mention in unit.mentions}

    def _add(self, name: str) -> None:
        """Add a module and the packages that it is in; of another name, those that it begins with
        and that are modules."""
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
        """Code that runs at import, or has been mentioned, is reached; other code once it is
        mentioned."""
        is_meant = unit.name == self._verb if unit.is_verb else unit.name in self._mentioned
        if is_meant or not unit.name or unit.name.startswith("__"):
            self._runs.append((module, unit))
        elif not unit.is_verb:
            self._asleep.setdefault(unit.name, []).append((module, unit))
