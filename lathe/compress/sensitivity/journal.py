"""What an analysis has found so far, a JSON line a finding, so that a killed one goes on."""

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lathe.errors import UserError
from lathe.inputs import open_file, parse_json
from lathe.storage import atomic_file

log = logging.getLogger("lathe")

T = TypeVar("T")

HINT = "move the file away, or give another --output"


class Journal:
    """Findings by name, in a file that outlives the process.

    JSON keeps every bit of a float, so a finding that is read back is the one that was made.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        """Go on with the file `path`, or begin it.

        Args:
            identity: digests of what the findings depend on.

        Raises:
            UserError: the file is of another identity, or no journal: it is then left as it is.
        """
        self.path = path
        self.found: dict[str, object] = {}
        if not path.exists():
            with atomic_file(path) as work:
                work.write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
            return
        with open_file(path, HINT) as file:
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a kill may have cut the last line
        first, *lines = whole.splitlines() or [b""]
        found = _identity(first, path)
        different = [k for k, v in identity.items() if found.get(k) != v]
        if different:
            raise UserError(
                f"{path}: holds an unfinished analysis with other {' and '.join(different)}",
                "give another --output, or delete the file",
            )
        for number, line in enumerate(lines, 2):
            name, finding = _finding(line, f"{path}:{number}")
            if name in self.found:
                raise UserError(f"{path}:{number}: a second finding {name!r}", HINT)
            self.found[name] = finding
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        log.info("%s: %d findings are there already", path, len(lines))

    def recall(self, name: str, find: Callable[[], T], kind: type = object) -> T:
        """The finding `name`, which is made by `find` unless it is there: numbers, in lists and
        dictionaries.

        Raises:
            UserError: what is there is not of the kind.
        """
        if name not in self.found:
            self.found[name] = find()
            line = json.dumps({"name": name, "finding": self.found[name]}, allow_nan=False)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        if not isinstance(self.found[name], kind):
            raise UserError(f"{self.path}: the finding {name!r} is no {kind.__name__}", HINT)
        return self.found[name]  # type: ignore[return-value]

    def close(self) -> None:
        """Delete the file: the analysis is finished."""
        self.path.unlink()


def _identity(line: bytes, path: Path) -> dict[str, object]:
    what = f"{path}: not the journal of an analysis"
    first = parse_json(line, what, HINT)
    if not isinstance(first, dict) or not isinstance(first.get("identity"), dict):
        raise UserError(what, HINT)
    return dict(first["identity"])


def _finding(line: bytes, where: str) -> tuple[str, object]:
    entry = parse_json(line, where, HINT)
    try:
        name, finding = entry["name"], entry["finding"]
    except (TypeError, KeyError, IndexError):
        raise UserError(f"{where}: no finding with its name", HINT) from None
    if not isinstance(name, str) or not _is_numbers(finding):
        raise UserError(f"{where}: not a finding: a name, and finite numbers", HINT)
    return name, finding


def _is_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return type(value) in (int, float) and abs(value) < math.inf  # type: ignore[arg-type]
