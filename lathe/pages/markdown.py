"""Rendering of Markdown pages, whose last line seals them: a page that somebody has edited is no
longer taken for one of Lathe's."""

import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_SEAL = re.compile(r"(.*\n)<!-- Written by Lathe\. SHA-256 of the text above: (\S+) -->\n", re.S)
_LARGEST = 2**24  # bytes of a page


def render_markdown(template: str, **values: Any) -> str:
    """Render a template, named by its path inside the package `lathe`, and seal it.

    The filter `cell` makes a text fit for a cell of a table.
    """
    environment = Environment(
        loader=PackageLoader("lathe", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    text = environment.get_template(template).render(**values).rstrip() + "\n\n"
    return f"{text}<!-- Written by Lathe. SHA-256 of the text above: {_digest(text)} -->\n"


def is_sealed(path: Path) -> bool:
    """Whether a file is a page that `render_markdown` made, and as it made it."""
    with path.open("rb") as file:
        content = file.read(_LARGEST).decode("utf-8", errors="replace")
    found = _SEAL.fullmatch(content)
    return found is not None and _digest(found[1]) == found[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
