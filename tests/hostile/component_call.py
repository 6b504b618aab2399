"""Calls KFP components in this process."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any


def call(name: str, arguments: Mapping[str, Any]) -> None:
    """Call a component's function; artifacts are given as paths."""
    from kfp import dsl

    function = getattr(importlib.import_module(f"components.{name}.component"), name).python_func
    given: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in arguments and parameter.default is not parameter.empty:
            continue
        value = arguments.get(parameter.name, parameter.name)
        given[parameter.name] = _artifacts(dsl, parameter, value)
    function(**given)


def _artifacts(dsl: Any, parameter: inspect.Parameter, value: Any) -> Any:
    text = str(parameter.annotation)
    kind = next((k for k in ("Model", "Dataset", "Metrics", "HTML", "Artifact") if k in text), None)
    if kind is None or value is None:
        return value
    if isinstance(value, list):
        return [getattr(dsl, kind)(name=parameter.name, uri=path) for path in value]
    return getattr(dsl, kind)(name=parameter.name, uri=value)
