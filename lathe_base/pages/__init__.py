"""HTML and Markdown pages with pictures: their templates, and the rendering of Markdown.

A Markdown page has a seal at its end, by which edited files are recognized and never overwritten.
"""

import functools
import hashlib
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

# Greedy, so that a page which quotes a seal has its own last one checked.
_SEAL = re.compile(r"(.*\n)<!-- Written by Lathe\. SHA-256 of the text above: (\S+) -->\n", re.S)
MAX_PAGE_BYTES = 2**24


def _read_template(name: str) -> str:
    package, _, path = name.partition("/")
    return files(package).joinpath(path).read_text(encoding="utf-8")


TEMPLATES = FunctionLoader(_read_template)
"""Loads a template by its package and its path inside: `lathe_base/pages/layout.html.j2`."""


def render_markdown(template: str, **values: Any) -> str:
    """Render a template, named by its package and its path inside, and seal it.

    The filter `cell` escapes text for a table cell.
    """
    return seal(_environment().get_template(template).render(**values).rstrip() + "\n\n")


@functools.cache  # it keeps the compiled templates: every checkpoint has a card
def _environment() -> Environment:
    environment = Environment(
        loader=TEMPLATES,
        undefined=StrictUndefined,  # a misspelled name is an error, not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    return environment


def seal(text: str) -> str:
    """The text, which ends with a line break, followed by its seal, a comment in HTML and SVG."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}<!-- Written by Lathe. SHA-256 of the text above: {digest} -->\n"


def is_sealed(path: Path) -> bool:
    """Whether a file is sealed and unchanged."""
    with path.open("rb") as file:
        content = file.read(MAX_PAGE_BYTES).decode("utf-8", errors="replace")
    match = _SEAL.fullmatch(content)
    return match is not None and content == seal(match[1])
