"""A compiled pipeline's graph: its steps, and a Mermaid diagram of it."""

from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from components.plan import recipe_argument
from components.step import FUNCTION
from pipelines.compiler.compile import built

INDENT = "  "
EXIT_HANDLER = "exit-handler-1"


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


def steps(name: str, has_chats: bool = False) -> list[PlacedStep]:
    """All steps of pipeline `name` and its sub-pipelines, in topological order."""
    spec = built(name, has_chats).pipeline_spec
    return list(_steps(spec, _body(spec)))


def _body(spec: Any) -> Any:
    """The DAG of a pipeline's steps, without the notification at its end."""
    return spec.components[spec.root.dag.tasks[EXIT_HANDLER].component_ref.name].dag


def _steps(spec: Any, dag: Any) -> Iterator[PlacedStep]:
    """Steps of a DAG."""
    for task in (dag.tasks[name] for name in _in_order(dag)):
        part = spec.components[task.component_ref.name]
        executor = spec.deployment_spec["executors"].fields.get(part.executor_label)
        if part.dag.tasks:
            yield from _steps(spec, part.dag)
        elif executor and "container" in executor.struct_value:
            arguments = list(executor.struct_value["container"]["args"])
            stage = arguments[arguments.index(FUNCTION) + 1]
            argument = recipe_argument(stage)
            is_there = argument in spec.root.input_definitions.parameters
            recipe = argument if is_there else argument and "recipe"
            yield PlacedStep(task.task_info.name, stage, recipe)


def mermaid(name: str, has_chats: bool = False) -> str:
    """Mermaid diagram of pipeline `name`: its steps and their dependencies, with a box around each
    sub-pipeline."""
    spec = built(name, has_chats).pipeline_spec
    return "\n".join(["flowchart LR", *_dag(spec, _body(spec), "", INDENT)])


def _in_order(dag: Any) -> list[str]:
    """Task names in a topological order that, unlike protobuf maps, is always the same."""
    before = {name: sorted(task.dependent_tasks) for name, task in sorted(dag.tasks.items())}
    return list(TopologicalSorter(before).static_order())


def _dag(spec: Any, dag: Any, prefix: str, indent: str) -> Iterator[str]:
    order = _in_order(dag)
    for name in order:
        task, key = dag.tasks[name], f"{prefix}{name}"
        inner = spec.components[task.component_ref.name].dag
        label = "model" if name == "importer" else task.task_info.name
        if inner.tasks:
            yield f'{indent}subgraph {key}["{label}"]'
            yield from _dag(spec, inner, f"{key}_", indent + INDENT)
            yield f"{indent}end"
        else:
            yield f'{indent}{key}["{label}"]'
    for name in order:
        for earlier in sorted(set(dag.tasks[name].dependent_tasks)):
            yield f"{indent}{prefix}{earlier} --> {prefix}{name}"
