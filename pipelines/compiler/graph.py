"""A compiled pipeline's graph: its steps, and a Mermaid diagram of it."""

from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from pipelines.compiler.compile import built
from components.stages import FUNCTION

INDENT = "  "


class PlacedStep(NamedTuple):
    """A step of a pipeline.

    Attributes:
        name: task name, such as `evaluate-int8`.
        stage: name of its component.
        recipe: pipeline argument passed as the step's `recipe`; empty if the step takes none.
    """

    name: str
    stage: str
    recipe: str


def steps(name: str) -> list[PlacedStep]:
    """All steps of pipeline `name` and its sub-pipelines, in topological order."""
    spec = built(name).pipeline_spec
    inputs = {key: key for key in spec.root.input_definitions.parameters}
    return list(_steps(spec, spec.root.dag, inputs))


def _steps(spec: Any, dag: Any, inputs: Mapping[str, str]) -> Iterator[PlacedStep]:
    """Steps of a DAG; `inputs` maps its inputs to the pipeline's arguments."""
    for task in (dag.tasks[name] for name in _in_order(dag)):
        given = {
            key: inputs.get(value.component_input_parameter, "")
            for key, value in task.inputs.parameters.items()
        }
        part = spec.components[task.component_ref.name]
        executor = spec.deployment_spec["executors"].fields.get(part.executor_label)
        if part.dag.tasks:
            yield from _steps(spec, part.dag, given)
        elif executor and "container" in executor.struct_value:
            arguments = list(executor.struct_value["container"]["args"])
            stage = arguments[arguments.index(FUNCTION) + 1]
            yield PlacedStep(task.task_info.name, stage, given.get("recipe", ""))


def mermaid(name: str) -> str:
    """Mermaid diagram of pipeline `name`: its steps and their dependencies, with a box around each
    sub-pipeline."""
    spec = built(name).pipeline_spec
    return "\n".join(["flowchart LR", *_dag(spec, spec.root.dag, "", INDENT)])


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
