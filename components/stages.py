"""The stages, each of which is a component, by name."""

from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FUNCTION = "--function_to_execute"
"""KFP's option, in the arguments of a step's container, that names the component."""
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/component.py"))


def component(name: str) -> Any:
    """The component of a stage; its attribute `step` declares its step."""
    return getattr(import_module(f"components.{name}.component"), name)


def step_names() -> list[str]:
    """The steps' names in pipelines, without the name of a model's variant."""
    return sorted({component(name).step.name or name for name in NAMES})
