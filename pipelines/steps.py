"""The steps that the pipelines share: a component with its inputs and resources."""

import copy
from collections.abc import Mapping
from typing import Any

from kfp import dsl

from components.analyze.component import analyze
from components.certify.component import certify
from components.choose.component import choose
from components.deploy.component import deploy
from components.design.component import design
from components.estimate.component import estimate
from components.evaluate.component import evaluate
from components.export.component import export
from components.gate.component import gate
from components.inputs.component import inputs as run_inputs
from components.join.component import join
from components.prepare.component import prepare
from components.pretrain.component import pretrain
from components.price.component import price
from components.prune.component import prune
from components.quantize.component import quantize
from components.release.component import release
from components.report.component import report
from components.tokenize.component import tokenize
from components.tokenizer.component import tokenizer
from pipelines.compiler.finished import turn_of
from pipelines.compiler.resources import (
    compiled_variant,
    on_cpu,
    on_gpu,
    on_training_node,
    on_training_nodes,
    task_of,
    trusting,
    waiting,
    with_engine,
)

PREPARE, CHOOSE = "prepare", "choose"


def look_up(recipe: str, overrides: Any, **given: Any) -> Mapping[str, Any]:
    """External inputs of a run and their content identifiers: the outputs of a step that always
    runs, or the values that a local run has already looked up.

    Recipes are separate parameters, not a list: Pipelines' launcher does not escape strings inside
    list parameters in the step's JSON, which breaks with a recipe's text."""
    if known := compiled_variant().inputs:
        return known
    task = waiting(run_inputs(recipe=recipe, overrides=overrides, **given), hours=0.5)
    found: Mapping[str, Any] = _of_this_run(task).outputs
    return found


class Steps:
    """Steps of one pipeline, each with the recipe that it is given and the same overrides.

    Args:
        found: see `look_up`; a part of a pipeline needs what its own steps read.
    """

    def __init__(self, overrides: list[str], found: Mapping[str, Any]) -> None:
        self.overrides, self.found = overrides, found

    def prepare(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        variant = compiled_variant()
        if variant.shards > 1 and PREPARE not in variant.finished:
            return self._prepare_in_shards(recipe, **inputs)
        return self._read_text(prepare, recipe, **inputs)

    def pretrain(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_nodes(self._of_weights(pretrain, recipe, **inputs), hours=240)

    def certify(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_node(self._task(certify, recipe, **inputs), hours=240)

    def prune(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_nodes(with_engine(self._of_weights(prune, recipe, **inputs)), hours=72)

    def analyze(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_gpu(with_engine(self._of_weights(analyze, recipe, **inputs)), hours=6, copies=6)

    def quantize(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        task = with_engine(self._of_weights(quantize, recipe, **inputs))
        return on_training_nodes(task, hours=72)

    def evaluate(self, variant: str, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        component = _named(evaluate, f"evaluate-{variant}")
        task = self._task(component, recipe, contents=self.found["scored"], **inputs)
        return on_gpu(with_engine(task), hours=6, copies=3)

    def export(self, variant: str, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        component = _named(export, f"export-{variant}")
        task = with_engine(self._of_weights(component, recipe, **inputs))
        return on_cpu(task, hours=2, copies=10)

    def gate(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return _of_this_run(waiting(self._task(gate, recipe, **inputs), hours=0.5))

    def estimate(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_gpu(self._of_weights(estimate, recipe, **inputs), hours=6, copies=6)

    def price(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_cpu(self._of_weights(price, recipe, **inputs), hours=2, copies=10)

    def design(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_cpu(self._of_weights(design, recipe, **inputs), hours=2, copies=10)

    def choose(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_cpu(self._task(choose, recipe, **inputs), hours=2, copies=10)

    def rehearse(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_cpu(self._task(_named(deploy, "rehearse"), recipe, **inputs), hours=1, copies=6)

    def release(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        task = trusting(on_cpu(self._task(release, recipe, **inputs), hours=6, copies=6))
        # What is live changes, and a release that was refused or rolled back must not be retried.
        return task.set_caching_options(False).set_retry(0)

    def report(self, recipe: str, models: dict[str, Any], **results: Any) -> dsl.PipelineTask:
        results |= {f"{variant}_model": model for variant, model in models.items()}
        return trusting(_of_this_run(waiting(self._task(report, recipe, **results), hours=1)))

    def compare(
        self, recipe: str, variants: dict[str, Any], data: Any, cloze: str
    ) -> dict[str, Any]:
        """Evaluate every variant, each beside the first, and export it; the results are inputs of
        `report`."""
        results: dict[str, Any] = {}
        first = next(iter(variants))
        for variant, model in variants.items():
            beside = {} if variant == first else {"reference": variants[first]}
            scored = self.evaluate(variant, recipe, model=model, data=data, cloze=cloze, **beside)
            exported = self.export(variant, recipe, model=model, data=data)
            results |= {
                f"{variant}_evaluation": scored.outputs["evaluation"],
                f"{variant}_export": exported.outputs["exported"],
            }
        return results

    def _prepare_in_shards(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        """The same in a step for each shard, of those that are not tokenized yet; the last step has
        the name and the outputs of the one that does it alone."""
        of, finished = compiled_variant().shards, compiled_variant().finished
        numbers = range(1, of + 1)
        done = [finished[turn_of(n)]["tokens"] for n in numbers if turn_of(n) in finished]
        given: dict[str, Any] = {"finished": done}
        if left := [n for n in numbers if turn_of(n) not in finished]:
            chosen = self._read_text(tokenizer, recipe, **inputs)
            with dsl.ParallelFor(left, name="shards") as number:
                own = {"tokenizer": chosen.outputs["vocabulary"], "shard": number, "of": of}
                shard = self._read_text(tokenize, recipe, **own)
            given["shards"] = dsl.Collected(shard.outputs["tokens"])
        return on_cpu(self._task(_named(join, PREPARE), recipe, **given), hours=4, copies=2)

    def _read_text(self, component: Any, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        text = {"corpus": self.found["corpus"], "contents": self.found["text"]}
        return on_cpu(self._task(component, recipe, **text, **inputs), hours=4, copies=2)

    def _of_weights(self, component: Any, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return self._task(component, recipe, contents=self.found["weights"], **inputs)

    def _task(self, component: Any, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return task_of(component, recipe=recipe, overrides=self.overrides, **inputs)


def _of_this_run(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Never taken from another run: who looks at a run wants its verdict and report there."""
    return task.set_caching_options(False)


def imported(model: str) -> Any:
    """The checkpoint folder at a path or address, as an artifact."""
    task = dsl.importer(artifact_uri=model, artifact_class=dsl.Model, reimport=False)
    return task.output


def _named(component: Any, name: str) -> Any:
    """The component renamed: otherwise a pipeline's second `evaluate` would be `evaluate-2`."""
    clone = copy.deepcopy(component)
    clone.name = clone.component_spec.name = name
    return clone
