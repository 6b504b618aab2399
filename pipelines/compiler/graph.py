"""A pipeline's graph, as the UI shows it, in the language of Mermaid."""

from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

from pipelines.compiler.compile import built

INDENT = "  "


def mermaid(name: str) -> str:
    """The graph of pipeline `name`: its steps, those of a part within a box, and what each waits
    for."""
    spec = built(name).pipeline_spec
    return "\n".join(["flowchart LR", *_dag(spec, spec.root.dag, "", INDENT)])


def _dag(spec: Any, dag: Any, prefix: str, indent: str) -> Iterator[str]:
    before = {name: set(task.dependent_tasks) for name, task in sorted(dag.tasks.items())}
    in_order = {name: sorted(earlier) for name, earlier in before.items()}
    order = list(TopologicalSorter(in_order).static_order())
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
        for earlier in sorted(before[name]):
            yield f"{indent}{prefix}{earlier} --> {prefix}{name}"
