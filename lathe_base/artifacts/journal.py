"""A journal of intermediate results, one JSON line each, from which long work resumes after a
kill."""

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lathe_base.errors import Code, UserError
from lathe_base.inputs import open_file, parse_json
from lathe_base.storage import atomic_file

log = logging.getLogger("lathe")

T = TypeVar("T")

HINT = "move the file away, or give another --output"


class Journal:
    """Results by name, in a file that outlives the process.

    JSON preserves every bit of a float, so results are read back exactly.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        """Resume from the file `path`, which the first result creates.

        Args:
            identity: digests of everything that the results depend on.

        Raises:
            UserError: the file has another identity or is not a journal; it is left unchanged.
        """
        self.path, self.identity = path, identity
        self.found: dict[str, object] = {}
        if not path.exists():
            return
        with open_file(path, HINT) as file:
            text = file.read()
        # Results are appended and synced one by one, so that only the last line can be incomplete.
        whole = text[: text.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [b""]
        what = f"{path}: not a journal of unfinished work"
        header = parse_json(first, what, HINT)
        recorded = header.get("identity") if isinstance(header, dict) else None
        if not isinstance(recorded, dict):
            raise UserError(what, HINT, Code.MALFORMED)
        different = [k for k, v in identity.items() if recorded.get(k) != v]
        if different:
            raise UserError(
                f"{path}: contains unfinished work with different {' and '.join(different)}",
                "give another --output, or delete the file",
                Code.STATE_MISMATCH,
            )
        for number, line in enumerate(lines, 2):
            where = f"{path}:{number}"
            entry = parse_json(line, where, HINT)
            try:
                name, finding = entry["name"], entry["finding"]
            except (TypeError, KeyError, IndexError):
                raise UserError(f"{where}: no result with a name", HINT, Code.MALFORMED) from None
            if not isinstance(name, str) or not _is_numbers(finding):
                raise UserError(
                    f"{where}: not a result with a name and finite numbers", HINT, Code.MALFORMED
                )
            if name in self.found:
                raise UserError(f"{where}: duplicate result {name!r}", HINT, Code.MALFORMED)
            self.found[name] = finding
        if len(whole) < len(text):  # what is appended next has to begin a line
            os.truncate(path, len(whole))
        log.info("%s: resuming with %d results", path, len(lines))

    def recall(self, name: str, find: Callable[[], T], kind: type = object) -> T:
        """The result `name`, computed by `find` if missing: numbers in lists and dictionaries.

        Raises:
            UserError: the stored value has another type.
        """
        if name not in self.found:
            self.found[name] = find()
            if not self.path.exists():
                with atomic_file(self.path) as work:
                    first = json.dumps({"identity": self.identity})
                    work.write_text(first + "\n", encoding="utf-8")
            line = json.dumps({"name": name, "finding": self.found[name]}, allow_nan=False)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                # A result may have taken minutes, so it also survives a machine that loses power.
                file.flush()
                os.fsync(file.fileno())
        if not isinstance(self.found[name], kind):
            raise UserError(
                f"{self.path}: the result {name!r} is not a {kind.__name__}", HINT, Code.MALFORMED
            )
        return self.found[name]  # type: ignore[return-value]

    def close(self) -> None:
        """Delete the file: the work is finished."""
        self.path.unlink(missing_ok=True)


def _is_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return type(value) in (int, float) and abs(value) < math.inf  # type: ignore[arg-type]
