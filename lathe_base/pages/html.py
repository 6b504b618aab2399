"""Rendering of HTML pages: the template engine escapes all text, and charts are SVG data URIs in a
light and a dark version."""

import base64
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, StrictUndefined

from lathe_base import __version__
from lathe_base.pages import TEMPLATES
from lathe_base.pages.style import DARK, LIGHT, Theme


@dataclass(frozen=True)
class Picture:
    """Data URIs of a chart, and its alternative text."""

    title: str
    alt: str
    light: str
    dark: str


def picture(title: str, alt: str, paint: Callable[[Theme], str]) -> Picture:
    """A chart in a light and a dark version, as data URIs."""
    light, dark = (
        "data:image/svg+xml;base64," + base64.b64encode(paint(theme).encode()).decode()
        for theme in (LIGHT, DARK)
    )
    return Picture(title, alt, light, dark)


def render(template: str, title: str, **values: Any) -> str:
    """Render a template, named by its package and its path inside."""
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            **values,
        )
    )


@functools.cache  # it keeps the compiled templates
def _environment() -> Environment:
    return Environment(
        loader=TEMPLATES,
        autoescape=True,  # pages show texts of corpora and of models
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
