"""Rendering of sealed Markdown pages."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lathe_base.pages.seal import seal


def render_markdown(template: str, **values: Any) -> str:
    """Render a template, named by its path inside the package `lathe`, and seal it.

    The filter `cell` escapes text for a table cell.
    """
    environment = Environment(
        loader=PackageLoader("lathe", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    return seal(environment.get_template(template).render(**values).rstrip() + "\n\n")


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
