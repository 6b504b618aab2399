"""Reuses the outputs of steps that an earlier run finished."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kfp import dsl
from kfp.dsl import structures
from kfp.dsl.importer_component import ImporterComponent
from kfp.dsl.placeholders import InputValuePlaceholder
from kfp.dsl.types.type_utils import create_bundled_artifact_type, is_parameter_type

from lathe.search.design import Proposal
from lathe_base.artifacts.kinds import SHARD, checked
from lathe_base.artifacts.metadata import ShardMetadata
from lathe_base.errors import UserError
from lathe_base.inputs import parse_json
from lathe_base.storage import read_text

METRICS = "metrics"
"""Artifact of every step, which Pipelines stores last, once the step has succeeded."""
TOKENIZE = "tokenize"
"""The step that tokenizes a shard."""
DESIGN = "design"
VALUE = "Output"
"""KFP's name for a component's return value, which only Pipelines' database contains."""
HINT = "run the pipeline again"
KINDS = (dsl.Artifact, dsl.Dataset, dsl.HTML, dsl.Metrics, dsl.Model)
TYPES = {kind.schema_title: kind for kind in KINDS}
Outputs = dict[str, Any]
"""Name of an output -> address of the artifact, or value of the parameter."""


class Finished:
    """Replaces the task of a finished step: imports its artifacts and passes on the values of its
    parameters, without a pod of its own."""

    def __init__(self, component: Any, outputs: Outputs) -> None:
        self.outputs = {
            name: outputs[name]
            if is_parameter_type(spec.type)
            else _imported(f"import-{component.name}-{name}", outputs[name], spec.type)
            for name, spec in component.component_spec.outputs.items()
            if name in outputs and name != METRICS
        }


def can_be_taken(component: Any, finished: Outputs) -> bool:
    """Whether the values of all parameters that the step returned are known."""
    outputs = component.component_spec.outputs or {}
    return all(name in finished for name, spec in outputs.items() if is_parameter_type(spec.type))


def finished_steps(root: str, addresses: Iterable[str]) -> dict[str, Outputs]:
    """Outputs of the steps that have succeeded, from the addresses of all objects of a run.

    An object's address is `<root>/<step>/<execution>/<output>`, followed by a file name if the
    output is a folder. An execution without metrics did not succeed. A step that succeeded several
    times, as in a loop, is omitted, except for shards (`shard_key`).
    """
    pattern = re.compile(rf"{re.escape(root.rstrip('/'))}/([a-z0-9-]+)/([0-9a-f-]{{36}})/(\w+)")
    executions: dict[str, dict[str, Outputs]] = {}
    for address in addresses:
        if match := pattern.match(address):
            step, execution, output = match.groups()
            executions.setdefault(step, {}).setdefault(execution, {})[output] = match[0]
    done = {
        step: [outputs for outputs in finished.values() if METRICS in outputs]
        for step, finished in executions.items()
    }
    shards = done.pop(TOKENIZE, [])
    once = {step: outputs[0] for step, outputs in done.items() if len(outputs) == 1}
    if designed := once.pop(DESIGN, None):
        with suppress(UserError):  # written by another version: the step runs again
            # Exactly as the step returned them: they are part of cache keys.
            where = designed["designs"]
            proposals = checked(
                parse_json(read_text(where), where, HINT), list[Proposal], where, HINT
            )
            once[DESIGN] = designed | {VALUE: [p.design.to_json() for p in proposals]}
    for outputs in shards:  # their steps all have the same name; the metadata has the number
        where = f"{outputs['tokens']}/{SHARD.metadata_file}"
        values = parse_json(read_text(where), where, HINT)
        once[shard_key(checked(values, ShardMetadata, where, HINT).shard)] = outputs
    return once


def shard_key(shard: int) -> str:
    """Key of a shard's step among the finished steps."""
    return f"{TOKENIZE} {shard}"


def _imported(name: str, address: str, type_name: str) -> Any:
    """Output of a task `name` that imports the artifact at an address.

    `dsl.importer` names every task `importer`, and in sub-pipelines KFP 2.17 mixes up executors
    whose names differ only by an appended number: docs/concepts/pipeline.md.
    """
    kind = TYPES[type_name.partition("@")[0]]
    bundled = create_bundled_artifact_type(kind.schema_title, kind.schema_version)
    importer = structures.ImporterSpec(
        artifact_uri=InputValuePlaceholder("uri")._to_string(),
        schema_title=bundled,
        schema_version=kind.schema_version,
        reimport=False,
    )
    spec = structures.ComponentSpec(
        name=name,
        implementation=structures.Implementation(importer=importer),
        inputs={"uri": structures.InputSpec(type="String")},
        outputs={"artifact": structures.OutputSpec(type=bundled)},
    )
    return ImporterComponent(component_spec=spec)(uri=address).output
