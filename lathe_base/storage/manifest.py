"""The manifest of a prefix lists its files; it is put last, so it marks a complete prefix."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lathe_base.errors import Code, UserError

MARKER = ".lathe.json"
# Present during an upload or a removal; without the marker, the prefix then counts as absent.
UNFINISHED = ".lathe.unfinished"
# A folder on this machine: what a fetch has downloaded so far.
STAGE = ".lathe.partial"
RESERVED_NAMES = (MARKER, UNFINISHED)


@dataclass(frozen=True)
class Entry:
    """A file of a prefix: its size and digest."""

    size: int  # bytes
    sha256: str  # lower-case hex


def to_json(files: Mapping[str, Entry]) -> str:
    """The text of the marker: the files by their relative names, with `/`."""
    listed = {name: {"size": e.size, "sha256": e.sha256} for name, e in sorted(files.items())}
    return json.dumps({"files": listed}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str | bytes, where: str) -> dict[str, Entry]:
    """Parse what `to_json` wrote.

    Raises:
        UserError: not a manifest, or a name in it leads out of the folder; names `where`.
    """
    try:
        files = dict[str, Entry]()
        for name, value in json.loads(text)["files"].items():
            size, sha256 = value["size"], value["sha256"]
            if type(size) is not int or size < 0:
                raise ValueError(f"size {size!r}")
            if not is_digest(sha256):
                raise ValueError(f"sha256 {sha256!r}")
            files[name] = Entry(size=size, sha256=sha256)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: not a Lathe manifest ({type(error).__name__}: {error})",
            "upload the folder again",
            Code.MALFORMED,
        ) from error
    for name in files:
        require_relative(name, where)
    return files


def is_digest(value: object) -> bool:
    """Whether it is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_relative(name: str) -> bool:
    """Whether it names a file below a folder: no `..`, no empty part, no NUL."""
    return not ({"", ".", ".."} & set(name.split("/")) or "\0" in name)


def require_relative(name: str, where: str) -> str:
    """Return `name`; raises UserError if it leads out of its folder; see `is_relative`."""
    if not is_relative(name):
        raise UserError(
            f"{where}: {name!r} is not a relative file name ('..' or an empty part)",
            "rename the object",
            Code.UNSAFE,
        )
    return name
