"""Compile the pipelines, and look into the result: images, graph, digest."""

import copy
import functools
import inspect
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.dsl.graph_component import GraphComponent

from components.images import TRAIN
from components.machines import Pool
from components.notify.component import notify
from components.plan import recipe_argument
from components.step import FUNCTION
from lathe_base import PACKAGES
from lathe_base.provenance.surroundings import PIPELINE
from lathe_base.storage import digest, sha256
from pipelines.compress import compress
from pipelines.full import full
from pipelines.pretrain import pretrain
from pipelines.prune import prune
from pipelines.qat import qat
from pipelines.steps.resources import Variant, place, with_webhook
from pipelines.steps.steps import Steps

ENGINE = "Compress.engine"
STEPS = "steps"
"""The node of the graph with all steps, which the notification follows."""
EXIT_HANDLER = "exit-handler-1"
"""KFP's name for its task."""
INDENT = "  "  # of Mermaid diagrams
FUNCTIONS: dict[str, Callable[..., None]] = {
    "pretrain": pretrain,
    "prune": prune,
    "qat": qat,
    "compress": compress,
    "full": full,
}

MACHINES: dict[str, tuple[Any, str]] = {
    "gpus": (Pool.gpus, "GPUs of each node that trains; 0 for none."),
    "nodes": (Pool.nodes, "Nodes to train on; with several, training is a TrainJob."),
    "cpus": (Pool.cpus, "CPU cores of every step that computes; 0 for an estimate."),
    "memory": (Pool.memory, "Memory of every compute step, such as 32Gi; estimated when empty."),
    "node_pool": (Pool.node_pool, "Value of the node label lathe/node-pool for steps with GPUs."),
    "queue": (Pool.queue, "Kueue LocalQueue of the training, which is then a TrainJob."),
    "notify": (False, "Whether to post the result to the address in the Secret lathe-webhook."),
}
"""Parameters of every run on a cluster -> default, description. An override such as
`Launch.nodes=2` replaces them."""

CHAT_ARGUMENTS = ("chat", "finetune_recipe")
"""Arguments of pipelines on conversations, in place of the corpus; the model is required then."""

PRUNE_RECIPES = {"prune": "recipe", "full": "prune_recipe"}
"""The argument of each pipeline that names the pruning recipe."""

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (*PACKAGES, "components")
"""The packages that a step's image contains and its process may import."""


def defaults(name: str, overrides: list[str]) -> dict[str, str]:
    """Arguments of pipeline `name` whose defaults depend on these overrides: PaddleSlim lacks the
    criterion of the default pruning recipe."""
    engines = [o for o in overrides if o.startswith(f"{ENGINE}=")]
    if name in PRUNE_RECIPES and engines[-1:] == [f"{ENGINE}=paddle"]:
        return {PRUNE_RECIPES[name]: "tiny-prune-paddle"}
    return {}


def build(name: str, variant: Variant = Variant()) -> GraphComponent:  # noqa: B008
    """Compile the pipeline `name`.

    Its runs have the parameters of the pipeline's function and `MACHINES`, which a local run
    ignores. The engine is part of the default overrides, since the images are compiled in.
    """
    overrides = [f"{ENGINE}={variant.engine}"] if variant.engine != Variant.engine else []
    function = _traceable(name, variant, overrides=overrides, **defaults(name, overrides))
    pipeline = dsl.pipeline(name=name)(function)
    # The UI draws a line for each dependency: indirect ones are removed (a transitive reduction).
    spec = pipeline.pipeline_spec
    for dag in [spec.root.dag, *(component.dag for component in spec.components.values())]:
        before = {name: set(task.dependent_tasks) for name, task in dag.tasks.items()}
        for name, task in dag.tasks.items():
            task.dependent_tasks[:] = sorted(before[name] - implied(name, before))
    require_own_executors(json_format.MessageToDict(spec))
    return pipeline


def _traceable(name: str, variant: Variant, **defaults: object) -> Callable[..., None]:
    """A pipeline's function as KFP traces it: with these defaults, with the parameters `MACHINES`,
    and as one node of the graph, followed by a notification whether or not it succeeds."""
    function, steps = FUNCTIONS[name], Steps(variant)
    # Those of the function, without `steps`; conversations take the place of the corpus.
    parameters = list(inspect.signature(function).parameters.values())[1:]
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in parameters]
    if variant.has_chats and takes_chats(name):
        parameters = [
            p.replace(default=p.empty) if p.name in ("chat", "model") else p for p in parameters
        ]
        parameters = sorted(parameters, key=lambda p: p.default is not p.empty)  # required first
        parameters = [p for p in parameters if p.name != "corpus"]
    else:
        parameters = [p for p in parameters if p.name not in CHAT_ARGUMENTS]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [
        inspect.Parameter(
            key, kind, default=variant.machines.get(key, default), annotation=type(default)
        )
        for key, (default, _) in MACHINES.items()
    ]
    signature = inspect.Signature([*parameters, *added])

    def traced(*values: Any) -> None:
        arguments = signature.bind(*values).arguments
        machines = {key: arguments.pop(key) for key in MACHINES}
        is_notified = machines.pop("notify")
        steps.machines = machines
        if variant.inputs is not None:  # a local run, which posts its result by itself
            function(steps, **arguments)
            return
        task = with_webhook(notify(pipeline=name, is_wanted=is_notified))
        with dsl.ExitHandler(place(task, notify.step, variant, {}), name=STEPS):
            function(steps, **arguments)

    # KFP takes descriptions from the docstring, whose last section is Args.
    lines = [f"    {key}: {text}" for key, (_, text) in MACHINES.items()]
    traced.__doc__ = "\n".join([inspect.getdoc(function) or "", *lines])
    traced.__name__, traced.__signature__ = name, signature  # type: ignore[attr-defined]
    return traced


def takes_chats(name: str) -> bool:
    """Whether a pipeline can finetune on conversations."""
    return name in FUNCTIONS and "chat" in inspect.signature(FUNCTIONS[name]).parameters


def implied(name: str, before: Mapping[str, set[str]]) -> set[str]:
    """The indirect dependencies of a task."""
    prerequisites: set[str] = set()
    for earlier in before[name]:
        prerequisites |= before[earlier] | implied(earlier, before)
    return prerequisites


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
                uri = task["inputs"]["parameters"]["uri"]["runtimeValue"]["constant"]
                if uri != taken["constant"]:
                    raise RuntimeError(f"compiled incorrectly: {name} imports {taken}, not {uri}")


def step_containers(pipeline: GraphComponent) -> dict[str, Any]:
    """The container of every step, as in the IR, by step name."""
    spec = pipeline.component_spec.implementation.graph.deployment_spec
    executors = json_format.MessageToDict(spec)["executors"]
    return {
        name.removeprefix("exec-"): executor["container"]
        for name, executor in sorted(executors.items())
        if "container" in executor
    }


def step_images(pipeline: GraphComponent) -> list[str]:
    """The images of the steps, the training image first."""
    images = {container["image"] for container in step_containers(pipeline).values()}
    return sorted(images, key=lambda image: (image != TRAIN, image))


def named(name: str, pipeline: GraphComponent) -> str:
    """A pipeline's name and the SHA-256 of its compiled YAML, as in the steps' attestations."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        compiler.Compiler().compile(pipeline, file.name)
        return f"{name}@sha256:{sha256(Path(file.name))}"


def with_own_digest(name: str, pipeline: GraphComponent) -> GraphComponent:
    """A copy of a pipeline with its name and digest in its steps' environment; the digest is the
    original's."""
    # Of the original: the variable with the digest cannot be part of it.
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
def built(name: str, has_chats: bool = False) -> GraphComponent:
    """The default variant of the pipeline `name`, or that on conversations, built on first use."""
    return build(name, Variant(has_chats=has_chats))


def write(folder: Path, variant: Variant = Variant()) -> list[Path]:  # noqa: B008
    """Compile each pipeline to `<folder>/<name>.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.yaml" for name in FUNCTIONS]
    for path in paths:
        pipeline = built(path.stem) if variant == Variant() else build(path.stem, variant)
        compiler.Compiler().compile(pipeline, str(path))
    return paths


class PlacedStep(NamedTuple):
    """A step of a pipeline.

    Attributes:
        name: task name, such as `evaluate-int8`.
        stage: name of its component.
        recipe: pipeline argument with the recipe of its settings; empty if the step takes none.
    """

    name: str
    stage: str
    recipe: str


def placed_steps(name: str, has_chats: bool = False) -> list[PlacedStep]:
    """All steps of pipeline `name` and its sub-pipelines, in topological order."""
    spec = built(name, has_chats).pipeline_spec

    def steps(dag: Any) -> Iterator[PlacedStep]:
        for task in (dag.tasks[key] for key in _in_order(dag)):
            part = spec.components[task.component_ref.name]
            executor = spec.deployment_spec["executors"].fields.get(part.executor_label)
            if part.dag.tasks:
                yield from steps(part.dag)
            elif executor and "container" in executor.struct_value:  # else an import
                arguments = list(executor.struct_value["container"]["args"])
                stage = arguments[arguments.index(FUNCTION) + 1]
                argument = recipe_argument(stage)
                # A pipeline without an argument for this recipe has one recipe for all steps.
                is_there = argument in spec.root.input_definitions.parameters
                recipe = argument if is_there else argument and "recipe"
                yield PlacedStep(task.task_info.name, stage, recipe)

    return list(steps(_body(spec)))


def mermaid(name: str, has_chats: bool = False) -> str:
    """Mermaid diagram of pipeline `name`: its steps and their dependencies, with a box around each
    sub-pipeline."""
    spec = built(name, has_chats).pipeline_spec

    def lines(dag: Any, prefix: str, indent: str) -> Iterator[str]:
        order = _in_order(dag)
        for key in order:
            task = dag.tasks[key]
            inner = spec.components[task.component_ref.name].dag
            label = "model" if key == "importer" else task.task_info.name
            if inner.tasks:
                yield f'{indent}subgraph {prefix}{key}["{label}"]'
                yield from lines(inner, f"{prefix}{key}_", indent + INDENT)
                yield f"{indent}end"
            else:
                yield f'{indent}{prefix}{key}["{label}"]'
        for key in order:
            for earlier in sorted(set(dag.tasks[key].dependent_tasks)):
                yield f"{indent}{prefix}{earlier} --> {prefix}{key}"

    return "\n".join(["flowchart LR", *lines(_body(spec), "", INDENT)])


def _body(spec: Any) -> Any:
    """The DAG of a pipeline's steps, without the notification at its end."""
    return spec.components[spec.root.dag.tasks[EXIT_HANDLER].component_ref.name].dag


def _in_order(dag: Any) -> list[str]:
    """Task names in a topological order that, unlike protobuf maps, is always the same."""
    before = {name: sorted(task.dependent_tasks) for name, task in sorted(dag.tasks.items())}
    return list(TopologicalSorter(before).static_order())


@functools.cache
def code_digest(root: Path = REPOSITORY) -> str:
    """Digest of the packages' files and the images' lock files, the same for all components."""
    paths = [path for package in SOURCES for path in (root / package).rglob("*")]
    files = sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    # The lock files stand for the installed packages.
    files += sorted(root.glob("images/*/*.lock"))
    return digest(json.dumps([[path.relative_to(root).as_posix(), sha256(path)] for path in files]))
