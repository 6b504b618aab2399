"""What the pipelines are made of: steps, each a component with its inputs and resources, and
sub-pipelines."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kfp import dsl
from kfp.dsl.pipeline_context import Pipeline

from components.evaluate.component import evaluate
from components.export.component import export
from components.images import PADDLE
from components.inputs.component import inputs
from components.join.component import join
from components.plan import SHARED
from components.prepare.component import prepare
from components.tokenize.component import tokenize
from components.tokenizer.component import tokenizer
from pipelines.steps.finished import Finished, can_be_taken, shard_key
from pipelines.steps.resources import Variant, place

TYPES: dict[str, type] = {"String": str, "Dict": dict, "List": list}
Task = Any
"""A task, or what replaces the task of a step that an earlier run finished: both have `outputs`."""


class Steps:
    """Adds steps to the pipeline that is being compiled.

    `steps.add(prune, model=dense, data=data)` is a task of the component `prune`, on the machine
    that it declares, with the settings that it declares.

    Attributes:
        variant: what the pipeline is compiled with.
        found: outputs of the component `inputs`.
    """

    def __init__(self, variant: Variant, found: Mapping[str, Any] | None = None) -> None:
        self.variant = variant
        self.found: Any = found or {}
        self.machines: Mapping[str, Any] = {}

    def look_up(self, recipe: str, overrides: list[str], **sources: Any) -> None:
        """Find a run's inputs, its steps' settings and their machines, in a step that always runs;
        for a local run they are known.

        Recipes are separate parameters, not a list: Pipelines' launcher does not escape strings
        inside list parameters in the step's JSON, which breaks with a recipe's text.
        """
        if self.variant.inputs is not None:
            self.found = self.variant.inputs
            return
        chats = {"has_chats": True} if self.variant.has_chats else {}
        task = inputs(recipe=recipe, overrides=overrides, **sources, **chats, **self.machines)
        place(task, inputs.step, self.variant, {})
        self.found = task.outputs

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
        finished = self.variant.finished.get(clone.name)
        if finished and can_be_taken(clone, finished):
            return Finished(clone, finished)
        container = clone.component_spec.implementation.container
        images = [container.image, *([PADDLE] if self.variant.engine == "paddle" else [])]
        if self.variant.code and not all("@sha256:" in image for image in images):
            # Pipelines' cache key includes the arguments; KFP's executor ignores unknown ones.
            container.args = [*container.args, "--code", self.variant.code]
        known = {"recipe": self.found[SHARED.get(component.name, component.name)]}
        if step.reads == "text":
            known["corpus"] = self.found["corpus"]
        if step.reads:
            known["contents"] = self.found[step.reads]
        return place(clone(**known, **inputs), step, self.variant, self.found)

    def group(self, function: Callable[..., Any], **given: Any) -> Any:
        """A sub-pipeline, one node of the graph, with the name of `function`, the steps that
        `function(steps, **given)` adds, and the outputs that it returns."""
        # A sub-pipeline sees its own inputs only. Traced with all that was found, it tells which
        # of these its steps use.
        outputs = inputs.component_spec.outputs
        types = {name: TYPES[spec.type.partition("[")[0]] for name, spec in outputs.items()}
        within = Steps(self.variant)
        _traced(function, within, types)
        used = within.found.used
        traced = _traced(function, within, {name: types[name] for name in sorted(used)})
        return traced(**given, **{name: self.found[name] for name in used})

    def prepare(self, **inputs: Any) -> Task:
        """Tokenize the corpus, in one step per shard if the run has several shards."""
        variant = self.variant
        if variant.shards == 1 or prepare.name in variant.finished:
            return self.add(prepare, **inputs)
        numbers = range(1, variant.shards + 1)
        finished = {n: variant.finished.get(shard_key(n)) for n in numbers}
        given: dict[str, Any] = {"finished": [f["tokens"] for f in finished.values() if f]}
        if left := [n for n, outputs in finished.items() if not outputs]:
            chosen = self.add(tokenizer, **inputs).outputs["vocabulary"]
            with dsl.ParallelFor(left, name="shards") as number:
                part = {"tokenizer": chosen, "shard": number, "of": variant.shards}
                shard = self.add(tokenize, **part)
            given["shards"] = dsl.Collected(shard.outputs["tokens"])
        return self.add(join, **given)

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


class _Found(dict[str, Any]):
    """The outputs of `inputs` within a sub-pipeline, which notes those that its steps use."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


def _traced(function: Callable[..., Any], steps: Steps, found: Mapping[str, type]) -> Any:
    """A sub-pipeline with the parameters of `function`, and `found`, name to type, which its steps
    use."""
    own = list(inspect.signature(function).parameters.values())[1:]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    more = [inspect.Parameter(name, kind, annotation=type) for name, type in found.items()]
    signature = inspect.signature(function).replace(parameters=[*own, *more])

    @functools.wraps(function)
    def traced(*values: Any) -> Any:
        given = signature.bind(*values).arguments
        steps.found = _Found({name: given.pop(name) for name in found})
        return function(steps, **given)

    traced.__signature__ = signature  # type: ignore[attr-defined]
    # KFP traces no pipeline within another.
    outer, Pipeline._default_pipeline = Pipeline._default_pipeline, None
    try:
        return dsl.pipeline(name=function.__name__)(traced)
    finally:
        Pipeline._default_pipeline = outer


def imported(model: str) -> Any:
    """The checkpoint folder at a path or address, as an artifact."""
    task = dsl.importer(artifact_uri=model, artifact_class=dsl.Model, reimport=False)
    return task.output
