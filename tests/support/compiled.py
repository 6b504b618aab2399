"""Compiled pipelines as Pipelines' driver sees them: with the values of a run's parameters."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from kfp import compiler
from kfp.dsl.graph_component import GraphComponent

from pipelines.compiler.compile import build
from pipelines.steps.resources import Variant
from tests.support import quick_kfp  # noqa: F401

PLACEHOLDER = re.compile(r"{{\$\.inputs\.parameters\['pipelinechannel--(?:inputs-)?(\w+)'\]}}")


Compiled = tuple[dict[str, Any], dict[str, Any]]
BUILT: dict[tuple[str, ...], GraphComponent] = {}
KNOWN: dict[tuple[str, str], Compiled] = {}


def build_once(name: str, variant: Variant = Variant()) -> GraphComponent:  # noqa: B008
    """Like `build`, but a variant is compiled once: not to be modified."""
    images = (os.environ.get(f"LATHE_{image}_IMAGE", "") for image in ("TRAIN", "PADDLE", "SERVE"))
    key = name, repr(variant), *images
    if key not in BUILT:
        BUILT[key] = build(name, variant)
    return BUILT[key]


def compiled(name: str, variant: Variant | None = None) -> Compiled:
    """The spec of a pipeline, and the Kubernetes settings of its executors, read from the YAML; not
    to be modified, since a variant is compiled once."""
    variant = variant or Variant()
    key = name, repr(variant)
    if key not in KNOWN:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.yaml"
            compiler.Compiler().compile(build_once(name, variant), str(path))
            spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
        KNOWN[key] = spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return KNOWN[key]


def pods(
    name: str, requests: Mapping[str, Any], variant: Variant | None = None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The container and the Kubernetes settings of every step, with the outputs `requests` of the
    step `inputs` in place of references to them."""
    spec, settings = compiled(name, variant)
    return {
        label.removeprefix("exec-"): (
            filled(executor["container"], requests),
            filled(settings[label], requests),
        )
        for label, executor in spec["deploymentSpec"]["executors"].items()
        if "container" in executor
    }


def filled(value: Any, requests: Mapping[str, Any]) -> Any:
    """A part of a pipeline with the values of `requests`.

    Pipelines 2.17 reads a parameter in a pod's resources only if it is a string.
    """
    if isinstance(value, list):
        return [filled(part, requests) for part in value]
    if isinstance(value, str) and (match := PLACEHOLDER.fullmatch(value)):
        text = requests[match[1]]
        assert isinstance(text, str), match[1]
        return text
    if not isinstance(value, dict):
        return value
    if "tolerationJson" in value:
        return requests[_parameter(value["tolerationJson"])]
    if "nodeSelectorJson" in value:
        return {"labels": requests[_parameter(value["nodeSelectorJson"])]}
    return {key: filled(part, requests) for key, part in value.items()}


def _parameter(reference: Mapping[str, Any]) -> str:
    if output := reference.get("taskOutputParameter"):
        assert output["producerTask"] == "inputs"
        return str(output["outputParameterKey"])
    name: str = reference["componentInputParameter"]
    return name.removeprefix("pipelinechannel--").removeprefix("inputs-")


def tolerations(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tolerations of a pod, of which those of a parameter are a list."""
    given = settings.get("tolerations", [])
    return [one for part in given for one in (part if isinstance(part, list) else [part])]


def all_tasks(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and tasks of the graph and its subgraphs."""
    for part in [spec["root"], *spec["components"].values()]:
        yield from part.get("dag", {}).get("tasks", {}).items()
