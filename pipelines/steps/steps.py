"""The steps that the pipelines share: a component with its inputs and resources."""

import copy
from collections.abc import Mapping
from typing import Any

from kfp import dsl

from components.evaluate.component import evaluate
from components.export.component import export
from components.inputs.component import inputs
from components.join.component import join
from components.prepare.component import prepare
from components.report.component import report
from components.tokenize.component import tokenize
from components.tokenizer.component import tokenizer
from pipelines.steps.finished import shard_key
from pipelines.steps.resources import compiled_variant, make_task, placed

PREPARE = "prepare"


def look_up(recipe: str, overrides: Any, **sources: Any) -> Mapping[str, Any]:
    """External inputs of a run and their content identifiers: the outputs of a step that always
    runs, or the values that a local run has already looked up.

    Recipes are separate parameters, not a list: Pipelines' launcher does not escape strings inside
    list parameters in the step's JSON, which breaks with a recipe's text."""
    if known := compiled_variant().inputs:
        return known
    task = placed(inputs(recipe=recipe, overrides=overrides, **sources), inputs.step)
    outputs: Mapping[str, Any] = task.outputs
    return outputs


class Steps:
    """Steps of one pipeline, each with its own recipe and the same overrides.

    `steps.add(price, recipe, model=..., costs=...)` is a task of the component `price`, on the
    machine that it declares.

    Args:
        found: see `look_up`; a sub-pipeline needs the inputs of its own steps.
    """

    def __init__(self, overrides: list[str], outputs: Mapping[str, Any]) -> None:
        self.overrides, self.found = overrides, outputs

    def add(self, component: Any, recipe: str, variant: str = "", **inputs: Any) -> Any:
        """The task of a step.

        Args:
            variant: name of the model, in a pipeline that has this step for several models.
        """
        name = component.step.name or component.name
        # A copy with a name of its own: KFP would call a pipeline's second `evaluate` `evaluate-2`.
        component = copy.deepcopy(component)
        component.name = component.component_spec.name = f"{name}-{variant}" if variant else name
        what = component.step.reads  # of the run's external inputs
        read = {"corpus": self.found["corpus"]} if what == "text" else {}
        read |= {"contents": self.found[what]} if what else {}
        return make_task(component, recipe=recipe, overrides=self.overrides, **read, **inputs)

    def prepare(self, recipe: str, **inputs: Any) -> Any:
        """Tokenize the corpus, in one step per shard if the run has several shards."""
        variant = compiled_variant()
        if variant.shards > 1 and PREPARE not in variant.finished:
            return self._prepare_in_shards(recipe, **inputs)
        return self.add(prepare, recipe, **inputs)

    def report(self, recipe: str, models: dict[str, Any], **results: Any) -> Any:
        """The report on these models, the dense one first."""
        results |= {f"{variant}_model": model for variant, model in models.items()}
        return self.add(report, recipe, **results)

    def compare(
        self, recipe: str, variants: dict[str, Any], data: Any, cloze: str
    ) -> dict[str, Any]:
        """Evaluate and export every variant, with the first as reference; the results are inputs of
        `report`."""
        results: dict[str, Any] = {}
        first = next(iter(variants))
        for variant, model in variants.items():
            beside = {} if variant == first else {"reference": variants[first]}
            scored = self.add(
                evaluate, recipe, variant, model=model, data=data, cloze=cloze, **beside
            )
            exported = self.add(export, recipe, variant, model=model, data=data)
            results |= {
                f"{variant}_evaluation": scored.outputs["evaluation"],
                f"{variant}_export": exported.outputs["exported"],
            }
        return results

    def _prepare_in_shards(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        """Like `prepare`, with one step per shard that is not tokenized yet; the last step has the
        name and outputs of `prepare`."""
        of, finished = compiled_variant().shards, compiled_variant().finished
        numbers = range(1, of + 1)
        done = [finished[shard_key(n)]["tokens"] for n in numbers if shard_key(n) in finished]
        given: dict[str, Any] = {"finished": done}
        if left := [n for n in numbers if shard_key(n) not in finished]:
            chosen = self.add(tokenizer, recipe, **inputs)
            with dsl.ParallelFor(left, name="shards") as number:
                shard_inputs = {
                    "tokenizer": chosen.outputs["vocabulary"],
                    "shard": number,
                    "of": of,
                }
                shard = self.add(tokenize, recipe, **shard_inputs)
            given["shards"] = dsl.Collected(shard.outputs["tokens"])
        return self.add(join, recipe, **given)


def imported(model: str) -> Any:
    """The checkpoint folder at a path or address, as an artifact."""
    task = dsl.importer(artifact_uri=model, artifact_class=dsl.Model, reimport=False)
    return task.output
