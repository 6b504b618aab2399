"""Steps that an earlier run has finished, whose outputs a new run takes."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kfp import dsl
from kfp.dsl import structures
from kfp.dsl.importer_component import ImporterComponent
from kfp.dsl.placeholders import InputValuePlaceholder
from kfp.dsl.types.type_utils import create_bundled_artifact_type, is_parameter_type

from lathe.errors import UserError
from lathe.inputs import parse_json
from lathe.search.design import Proposal
from lathe.storage import read_text
from lathe.storage.artifacts.kinds import SHARD, checked
from lathe.storage.artifacts.metadata import ShardMetadata

METRICS = "metrics"
"""Artifact of every step, which Pipelines stores last, when the step has succeeded."""
TOKENIZE = "tokenize"
"""The step of a shard."""
DESIGN = "design"
VALUE = "Output"
"""KFP's name of what a component returns, which is in Pipelines' database only."""
HINT = "run the pipeline again"
KINDS = (dsl.Artifact, dsl.Dataset, dsl.HTML, dsl.Metrics, dsl.Model)
TYPES = {kind.schema_title: kind for kind in KINDS}
Outputs = dict[str, Any]
"""Output -> address of an artifact, or value of a parameter."""


class Finished:
    """Stands for the task of such a step: imports of its artifacts, the values of its parameters,
    and no pod of its own."""

    def __init__(self, component: Any, found: Outputs) -> None:
        self.outputs = {
            name: found[name]
            if is_parameter_type(spec.type)
            else _imported(f"import-{component.name}-{name}", found[name], spec.type)
            for name, spec in component.component_spec.outputs.items()
            if name in found and name != METRICS
        }


def can_be_taken(component: Any, found: Outputs) -> bool:
    """Whether the values of all parameters that a step has returned are known."""
    outputs = component.component_spec.outputs or {}
    return all(name in found for name, spec in outputs.items() if is_parameter_type(spec.type))


def finished_steps(root: str, addresses: Iterable[str]) -> dict[str, Outputs]:
    """The outputs of the steps that have succeeded, from the addresses of all objects of a run.

    An object's address is `<root>/<step>/<execution>/<output>`, followed by the name of a file if
    the output is a folder. An execution that was lost has no metrics; a step that has succeeded
    several times, as in a loop, is left out, but for shards: see `turn_of`.
    """
    pattern = re.compile(rf"{re.escape(root.rstrip('/'))}/([a-z0-9-]+)/([0-9a-f-]{{36}})/(\w+)")
    executions: dict[str, dict[str, Outputs]] = {}
    for address in addresses:
        if match := pattern.match(address):
            step, execution, output = match.groups()
            executions.setdefault(step, {}).setdefault(execution, {})[output] = match[0]
    done = {
        step: [outputs for outputs in found.values() if METRICS in outputs]
        for step, found in executions.items()
    }
    shards = done.pop(TOKENIZE, [])
    once = {step: outputs[0] for step, outputs in done.items() if len(outputs) == 1}
    if designed := once.pop(DESIGN, None):
        with suppress(UserError):  # the file is another version's: the step runs again
            once[DESIGN] = designed | {VALUE: _designs(designed["designs"])}
    return once | {turn_of(_number(outputs)): outputs for outputs in shards}


def turn_of(shard: int) -> str:
    """The key of a shard's step among the finished steps."""
    return f"{TOKENIZE} {shard}"


def _number(outputs: Outputs) -> int:
    """The number of a shard, which is in its metadata: the name of its step is that of all."""
    where = f"{outputs['tokens']}/{SHARD.metadata_file}"
    values = parse_json(read_text(where), where, HINT)
    return checked(values, ShardMetadata, where, HINT).shard


def _designs(where: str) -> list[str]:
    """The designs in a file as the step has returned them, to the letter: they are in the keys of
    Pipelines' cache."""
    values = parse_json(read_text(where), where, HINT)
    return [found.design.to_json() for found in checked(values, list[Proposal], where, HINT)]


def _imported(name: str, address: str, type_name: str) -> Any:
    """The output of a task `name` that imports the artifact at an address.

    `dsl.importer` calls every task `importer`, and where a pipeline is part of another KFP 2.17
    confuses executors whose names differ by an added number: docs/concepts/pipeline.md.
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
