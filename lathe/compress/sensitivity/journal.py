"""What an analysis has found so far, a JSON line a finding, so that a killed one goes on."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lathe.errors import UserError
from lathe.storage import atomic_file

log = logging.getLogger("lathe")

T = TypeVar("T")


class Journal:
    """Findings by name, in a file that outlives the process.

    JSON keeps every bit of a float, so a finding that is read back is the one that was made.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        """Go on with the file `path`, or begin it.

        Args:
            identity: digests of what the findings depend on.

        Raises:
            UserError: the file is of another identity.
        """
        self.path = path
        self.found: dict[str, object] = {}
        if not path.is_file():
            with atomic_file(path) as work:
                work.write_text(json.dumps({"identity": identity}) + "\n")
            return
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a kill may have cut the last line
        first, *lines = map(json.loads, whole.splitlines())
        different = [k for k, v in identity.items() if first["identity"].get(k) != v]
        if different:
            raise UserError(
                f"{path}: holds an unfinished analysis with other {' and '.join(different)}",
                "give another --output, or delete the file",
            )
        self.found = {line["name"]: line["finding"] for line in lines}
        os.truncate(path, len(whole))
        log.info("%s: %d findings are there already", path, len(lines))

    def recall(self, name: str, find: Callable[[], T]) -> T:
        """The finding `name`, which is made by `find` (JSON values only) unless it is there."""
        if name not in self.found:
            self.found[name] = find()
            line = json.dumps({"name": name, "finding": self.found[name]}, allow_nan=False)
            with self.path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        return self.found[name]  # type: ignore[return-value]

    def close(self) -> None:
        """Delete the file: the analysis is finished."""
        self.path.unlink()
