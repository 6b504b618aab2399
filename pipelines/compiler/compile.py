"""Write every pipeline's IR YAML: `python -m pipelines.compiler.compile [FOLDER]`."""

import copy
import functools
import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.dsl.graph_component import GraphComponent

from components.images import TRAIN
from components.notify.component import notify
from lathe_base.provenance.surroundings import PIPELINE
from lathe_base.storage import sha256
from pipelines.compress import compress
from pipelines.full import full
from pipelines.pretrain import pretrain
from pipelines.prune import prune
from pipelines.qat import qat
from pipelines.steps.groups import groups_of
from pipelines.steps.resources import Pool, Variant, compiling, with_webhook

ENGINE = "Compress.engine"
FUNCTIONS: dict[str, Callable[..., None]] = {
    "pretrain": pretrain,
    "prune": prune,
    "qat": qat,
    "compress": compress,
    "full": full,
}


PRUNE_RECIPES = {"prune": "recipe", "full": "prune_recipe"}
"""The argument of each pipeline that names the pruning recipe."""


def defaults(name: str, overrides: list[str]) -> dict[str, str]:
    """Arguments of pipeline `name` whose defaults depend on these overrides: PaddleSlim lacks the
    criterion of the default pruning recipe."""
    engines = [o for o in overrides if o.startswith(f"{ENGINE}=")]
    if name in PRUNE_RECIPES and engines[-1:] == [f"{ENGINE}=paddle"]:
        return {PRUNE_RECIPES[name]: "tiny-prune-paddle"}
    return {}


def build(name: str, variant: Variant = Variant()) -> GraphComponent:  # noqa: B008
    """Compile the pipeline `name` for `variant`.

    Its default `overrides` include the variant's machines and engine, so that a run started from
    the UI trains on the machines that its tasks request.
    """
    pool = variant.pool
    overrides = [f"{ENGINE}={pool.engine}"] if pool.engine != Pool.engine else []
    overrides += variant.overrides
    function = _with_default(FUNCTIONS[name], overrides=overrides, **defaults(name, overrides))
    function = _with_notice(name, function) if variant.notify else function
    with compiling(variant):
        for group in groups_of(function):
            group.trace()
        pipeline = dsl.pipeline(name=name)(function)
    _draw_less(pipeline.pipeline_spec)
    require_own_executors(json_format.MessageToDict(pipeline.pipeline_spec))
    return pipeline


def _draw_less(spec: Any) -> None:
    """Remove indirect dependencies from a compiled pipeline (its transitive reduction): the UI
    draws a line for each dependency."""
    for dag in [spec.root.dag, *(component.dag for component in spec.components.values())]:
        before = {name: set(task.dependent_tasks) for name, task in dag.tasks.items()}
        for name, task in dag.tasks.items():
            task.dependent_tasks[:] = sorted(before[name] - implied(name, before))


def implied(name: str, before: Mapping[str, set[str]]) -> set[str]:
    """The indirect dependencies of a task."""
    found: set[str] = set()
    for earlier in before[name]:
        found |= before[earlier] | implied(earlier, before)
    return found


def require_own_executors(spec: Mapping[str, Any]) -> None:
    """Check that each task of a compiled pipeline runs its own executor: KFP 2.17 mixes up some
    with the same name (docs/concepts/pipeline.md).

    Raises:
        RuntimeError: an executor belongs to no component or to several, or a task imports another
            address than its own.
    """
    components = spec.get("components", {})
    used = Counter(c["executorLabel"] for c in components.values() if "executorLabel" in c)
    executors = spec["deploymentSpec"]["executors"]
    if wrong := [name for name in executors if used[name] != 1]:
        raise RuntimeError(f"compiled incorrectly: not used by exactly one component: {wrong}")
    for dag in [spec["root"], *components.values()]:
        for name, task in dag.get("dag", {}).get("tasks", {}).items():
            label = components[task["componentRef"]["name"]].get("executorLabel")
            taken = executors.get(label, {}).get("importer", {}).get("artifactUri", {})
            if "constant" in taken:
                given = task["inputs"]["parameters"]["uri"]["runtimeValue"]["constant"]
                if given != taken["constant"]:
                    raise RuntimeError(f"compiled incorrectly: {name} imports {taken}, not {given}")


def _with_default(function: Callable[..., None], **defaults: object) -> Callable[..., None]:
    @functools.wraps(function)
    def clone(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)

    signature = inspect.signature(function)
    parameters = [
        p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()
    ]
    clone.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return clone


def _with_notice(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """The pipeline as one node of the graph, followed by a notification whether or not it
    succeeds."""

    @functools.wraps(function)
    def notifying(*args: object, **kwargs: object) -> None:
        with dsl.ExitHandler(with_webhook(notify(pipeline=name), notify.step), name=name):
            function(*args, **kwargs)

    return notifying


def containers_of(pipeline: GraphComponent) -> dict[str, Any]:
    """The container of every step, as in the IR, by step name."""
    spec = pipeline.component_spec.implementation.graph.deployment_spec
    executors = json_format.MessageToDict(spec)["executors"]
    return {
        name.removeprefix("exec-"): executor["container"]
        for name, executor in sorted(executors.items())
        if "container" in executor
    }


def images_of(pipeline: GraphComponent) -> list[str]:
    """The images of the steps, the training image first."""
    found = {container["image"] for container in containers_of(pipeline).values()}
    return sorted(found, key=lambda image: (image != TRAIN, image))


def named(name: str, pipeline: GraphComponent) -> str:
    """A pipeline's name and the SHA-256 of its compiled YAML, as in the steps' attestations."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        compiler.Compiler().compile(pipeline, file.name)
        return f"{name}@sha256:{sha256(Path(file.name))}"


def with_own_digest(name: str, pipeline: GraphComponent) -> GraphComponent:
    """A copy of a pipeline with its name and digest in its steps' environment; the digest is the
    original's."""
    clone = copy.deepcopy(pipeline)
    variable = {"name": PIPELINE, "value": named(name, pipeline)}
    executors = clone.component_spec.implementation.graph.deployment_spec["executors"]
    for executor in executors.values():
        if "container" in executor:
            container = executor["container"]
            known = list(container["env"]) if "env" in container else []
            container.update({"env": [*known, variable]})
    return clone


@functools.cache
def built(name: str) -> GraphComponent:
    """The default variant of the pipeline `name`, built on first use."""
    return build(name)


def write(folder: Path) -> list[Path]:
    """Compile each pipeline to `<folder>/<name>.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.yaml" for name in FUNCTIONS]
    for path in paths:
        compiler.Compiler().compile(built(path.stem), str(path))
    return paths


if __name__ == "__main__":
    for written in write(Path(*sys.argv[1:] or ["build"])):
        print(written)
