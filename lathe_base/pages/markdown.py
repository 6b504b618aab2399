"""Rendering of sealed Markdown pages."""

from typing import Any

from jinja2 import Environment, StrictUndefined

from lathe_base.pages import TEMPLATES
from lathe_base.pages.seal import seal


def render_markdown(template: str, **values: Any) -> str:
    """Render a template, named by its package and its path inside, and seal it.

    The filter `cell` escapes text for a table cell.
    """
    environment = Environment(
        loader=TEMPLATES,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    return seal(environment.get_template(template).render(**values).rstrip() + "\n\n")
