"""A seal at the end of a page or chart, by which edited files are recognized and never
overwritten."""

import hashlib
import re
from pathlib import Path

_SEAL = re.compile(r"(.*\n)<!-- Written by Lathe\. SHA-256 of the text above: (\S+) -->\n", re.S)
_LARGEST = 2**24  # bytes of a page


def seal(text: str) -> str:
    """The text, which ends with a line break, followed by its seal, a comment in HTML and SVG."""
    return f"{text}<!-- Written by Lathe. SHA-256 of the text above: {_digest(text)} -->\n"


def is_sealed(path: Path) -> bool:
    """Whether a file is sealed and unchanged."""
    with path.open("rb") as file:
        content = file.read(_LARGEST).decode("utf-8", errors="replace")
    found = _SEAL.fullmatch(content)
    return found is not None and _digest(found[1]) == found[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
