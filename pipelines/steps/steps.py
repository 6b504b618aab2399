"""What the pipelines are made of: steps, each a component with its inputs and resources; the
outputs of steps that an earlier run finished; and groups of steps that several pipelines have."""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl import structures
from kfp.dsl.importer_component import ImporterComponent
from kfp.dsl.pipeline_context import Pipeline
from kfp.dsl.placeholders import InputValuePlaceholder
from kfp.dsl.types.type_utils import create_bundled_artifact_type, is_parameter_type

from components.analyze.component import analyze
from components.deploy.component import deploy
from components.evaluate.component import evaluate
from components.export.component import export
from components.gate.component import gate
from components.images import PADDLE
from components.inputs.component import inputs
from components.join.component import join
from components.plan import SHARED
from components.prepare.component import prepare
from components.quantize.component import quantize
from components.release.component import release
from components.tokenize.component import tokenize
from components.tokenizer.component import tokenizer
from lathe.search.design import Proposal
from lathe_base.artifacts.kinds import SHARD, checked
from lathe_base.artifacts.metadata import ShardMetadata
from lathe_base.errors import UserError
from lathe_base.inputs import parse_json
from lathe_base.storage import read_text
from pipelines.steps.resources import Outputs, Variant, place

TYPES: dict[str, type] = {"String": str, "Dict": dict, "List": list}
"""KFP's names of the types of parameters."""
METRICS = "metrics"
"""Artifact of every step, which Pipelines stores last, once the step has succeeded."""
TOKENIZE = "tokenize"
"""The step that tokenizes a shard."""
DESIGN = "design"
VALUE = "Output"
"""KFP's name for a component's return value, which only Pipelines' database contains."""
HINT = "run the pipeline again"
KINDS = {
    kind.schema_title: kind
    for kind in (dsl.Artifact, dsl.Dataset, dsl.HTML, dsl.Metrics, dsl.Model)
}
Task = Any
"""A task, or what replaces the task of a step that an earlier run finished: both have `outputs`."""


class Steps:
    """Adds steps to the pipeline that is being compiled.

    `steps.add(prune, model=dense, data=data)` is a task of the component `prune`, on the machine
    that it declares, with the settings that it declares.

    Attributes:
        variant: what the pipeline is compiled with.
        resolved: outputs of the component `inputs`.
    """

    def __init__(self, variant: Variant, resolved: Mapping[str, Any] | None = None) -> None:
        self.variant = variant
        self.resolved: Any = resolved or {}
        self.machines: Mapping[str, Any] = {}

    def look_up(self, recipe: str, overrides: list[str], **sources: Any) -> None:
        """Find a run's inputs, its steps' settings and their machines, in a step that always runs;
        for a local run they are known.

        Recipes are separate parameters, not a list: Pipelines' launcher does not escape strings
        inside list parameters in the step's JSON, which breaks with a recipe's text.
        """
        if self.variant.inputs is not None:
            self.resolved = self.variant.inputs
            return
        chats = {"has_chats": True} if self.variant.has_chats else {}
        task = inputs(recipe=recipe, overrides=overrides, **sources, **chats, **self.machines)
        place(task, inputs.step, self.variant, {})
        self.resolved = task.outputs

    def add(self, component: Any, name: str = "", **inputs: Any) -> Task:
        """The task of a component's step.

        Args:
            name: of the model, in a pipeline that has this step for several models.
        """
        step = component.step
        # A copy with a name of its own: KFP would call a pipeline's second `evaluate` `evaluate-2`.
        clone = copy.deepcopy(component)
        usual = step.name or component.name
        clone.name = clone.component_spec.name = f"{usual}-{name}" if name else usual
        # A step that an earlier run finished needs no pod.
        finished = self.variant.finished.get(clone.name)
        if finished and can_be_taken(clone, finished):
            return Finished(clone, finished)
        container = clone.component_spec.implementation.container
        images = [container.image, *([PADDLE] if self.variant.engine == "paddle" else [])]
        if self.variant.code and not all("@sha256:" in image for image in images):
            # Pipelines' cache key includes the arguments; KFP's executor ignores unknown ones.
            container.args = [*container.args, "--code", self.variant.code]
        # The step's inputs that it declares rather than a pipeline passes.
        known = {"recipe": self.resolved[SHARED.get(component.name, component.name)]}
        if step.reads == "text":
            known["corpus"] = self.resolved["corpus"]
        if step.reads:
            known["contents"] = self.resolved[step.reads]
        return place(clone(**known, **inputs), step, self.variant, self.resolved)

    def group(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """A sub-pipeline, one node of the graph, with the name of `function`, the steps that
        `function(steps, **arguments)` adds, and the outputs that it returns."""
        # A sub-pipeline sees its own inputs only. Traced with all that was found, it tells which
        # of these its steps use.
        outputs = inputs.component_spec.outputs
        types = {name: TYPES[spec.type.partition("[")[0]] for name, spec in outputs.items()}
        within = Steps(self.variant)
        _traced(function, within, types)  # this one is thrown away
        used = within.resolved.used
        traced = _traced(function, within, {name: types[name] for name in sorted(used)})
        return traced(**arguments, **{name: self.resolved[name] for name in used})

    def prepare(self, **inputs: Any) -> Task:
        """Tokenize the corpus, in one step per shard if the run has several shards."""
        variant = self.variant
        if variant.shards == 1 or prepare.name in variant.finished:
            return self.add(prepare, **inputs)
        numbers = range(1, variant.shards + 1)
        finished = {n: variant.finished.get(shard_key(n)) for n in numbers}
        # Shards that an earlier run has tokenized are taken; the others run in parallel.
        parts: dict[str, Any] = {"finished": [f["tokens"] for f in finished.values() if f]}
        if left := [n for n, outputs in finished.items() if not outputs]:
            chosen = self.add(tokenizer, **inputs).outputs["vocabulary"]
            with dsl.ParallelFor(left, name="shards") as number:
                part = {"tokenizer": chosen, "shard": number, "of": variant.shards}
                shard = self.add(tokenize, **part)
            parts["shards"] = dsl.Collected(shard.outputs["tokens"])
        return self.add(join, **parts)

    def compare(self, models: Mapping[str, Any], data: Any, cloze: str) -> dict[str, Any]:
        """Evaluate and export every model, with the first as reference; the results are inputs of
        `report`."""
        results: dict[str, Any] = {}
        first = next(iter(models))
        for name, model in models.items():
            beside = {} if name == first else {"reference": models[first]}
            scored = self.add(evaluate, name, model=model, data=data, cloze=cloze, **beside)
            exported = self.add(export, name, model=model, data=data)
            results |= {
                f"{name}_model": model,
                f"{name}_evaluation": scored.outputs["evaluation"],
                f"{name}_export": exported.outputs["exported"],
            }
        return results


class _Resolved(dict[str, Any]):
    """The outputs of `inputs` within a sub-pipeline, which notes those that its steps use."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


def _traced(function: Callable[..., Any], steps: Steps, resolved: Mapping[str, type]) -> Any:
    """A sub-pipeline with the parameters of `function`, and those of `resolved`, name to type,
    which its steps use."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [inspect.Parameter(name, kind, annotation=type) for name, type in resolved.items()]
    signature = inspect.signature(function).replace(parameters=[*parameters, *added])

    @functools.wraps(function)
    def traced(*values: Any) -> Any:
        arguments = signature.bind(*values).arguments
        steps.resolved = _Resolved({name: arguments.pop(name) for name in resolved})
        return function(steps, **arguments)

    traced.__signature__ = signature  # type: ignore[attr-defined]
    # KFP traces no pipeline within another.
    outer, Pipeline._default_pipeline = Pipeline._default_pipeline, None
    try:
        return dsl.pipeline(name=function.__name__)(traced)
    finally:
        Pipeline._default_pipeline = outer


class Finished:
    """Replaces the task of a finished step: imports its artifacts and passes on the values of its
    parameters, without a pod of its own."""

    def __init__(self, component: Any, outputs: Outputs) -> None:
        self.outputs = {
            name: outputs[name]
            if is_parameter_type(spec.type)
            else _import_task(f"import-{component.name}-{name}", outputs[name], spec.type)
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


def _import_task(name: str, address: str, type_name: str) -> Any:
    """Output of a task `name` that imports the artifact at an address.

    `dsl.importer` names every task `importer`, and in sub-pipelines KFP 2.17 mixes up executors
    whose names differ only by an appended number: docs/concepts/pipeline.md.
    """
    kind = KINDS[type_name.partition("@")[0]]
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


def imported(model: str) -> Any:
    """The checkpoint folder at a path or address, as an artifact."""
    task = dsl.importer(artifact_uri=model, artifact_class=dsl.Model, reimport=False)
    return task.output


class Quantized(NamedTuple):
    """The outputs of `quantization`.

    The UI knows a line of its graph by the output's name and the task that reads it: an output
    `model` would hide the line of the dense model, which `judge` reads as well.
    """

    quantized: dsl.Model
    sensitivity: dsl.Dataset


def quantization(
    steps: Steps, model: dsl.Input[dsl.Model], data: dsl.Input[dsl.Dataset]
) -> Quantized:
    """A sub-pipeline: rank the linear layers by the cost of INT8, and train the model in INT8."""
    ranked = steps.add(analyze, model=model, data=data).outputs["sensitivity"]
    int8 = steps.add(quantize, model=model, data=data, sensitivity=ranked)
    return Quantized(quantized=int8.outputs["quantized"], sensitivity=ranked)


def rehearse_and_release(
    steps: Steps, int8: Any, results: Mapping[str, Any], data: Any, cloze: str, production: str
) -> Any:
    """Rehearse the deployment of the INT8 model, compare it with the dense one, and release it if
    it passes and `production` is set; returns the rehearsal.

    Args:
        results: what `Steps.compare` returns.
    """
    exported, evaluation = results["int8_export"], results["int8_evaluation"]
    deployed = steps.add(deploy, exported=exported, model=int8, data=data).outputs["deployed"]
    gated = steps.add(
        gate, baseline=results["dense_evaluation"], candidate=evaluation, production=production
    ).outputs
    # KFP 2.17's local runner finds no other output of a step than `Output` in a condition.
    with dsl.If(gated["Output"] == True, "to-production"):  # noqa: E712
        steps.add(
            release,
            deployed=deployed,
            evaluation=evaluation,
            gate=gated["verdict"],
            model=int8,
            data=data,
            cloze=cloze,
            production=production,
        )
    return deployed
