"""HTML and Markdown pages with pictures."""

from importlib.resources import files

from jinja2 import FunctionLoader


def _read_template(name: str) -> str:
    package, _, path = name.partition("/")
    return files(package).joinpath(path).read_text(encoding="utf-8")


TEMPLATES = FunctionLoader(_read_template)
"""Loads a template by its package and its path inside: `lathe_base/pages/layout.html.j2`."""
