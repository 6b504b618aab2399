"""The steps that the pipelines share: a component with its inputs and resources."""

import copy
from typing import Any

from kfp import dsl

from components.analyze.component import analyze
from components.challenge.component import challenge
from components.choose.component import choose
from components.deploy.component import deploy
from components.evaluate.component import evaluate
from components.export.component import export
from components.gate.component import gate
from components.prepare.component import prepare
from components.pretrain.component import pretrain
from components.prune.component import prune
from components.quantize.component import quantize
from components.release.component import release
from components.report.component import report
from components.resolve.component import resolve
from pipelines.resources import on_cpu, on_gpu, on_training_nodes, waiting, with_engine


class Steps:
    """Steps of one pipeline, each with the recipe that it is given and the same overrides."""

    def __init__(self, overrides: list[str]) -> None:
        self.overrides = overrides

    def prepare(self, recipe: str, corpus: str, **inputs: Any) -> dsl.PipelineTask:
        found = waiting(self._task(resolve, recipe, corpus=corpus), hours=0.5)
        found.set_caching_options(False)  # the newest corpus changes over time
        inputs["corpus"] = found.outputs["Output"]
        return on_cpu(self._task(prepare, recipe, **inputs), hours=4)

    def pretrain(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_nodes(self._task(pretrain, recipe, **inputs), hours=240)

    def prune(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_nodes(self._by_engine(prune, recipe, **inputs), hours=72)

    def analyze(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_gpu(self._by_engine(analyze, recipe, **inputs), hours=6)

    def quantize(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_training_nodes(self._by_engine(quantize, recipe, **inputs), hours=72)

    def evaluate(self, variant: str, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        component = _named(evaluate, f"evaluate-{variant}")
        return on_gpu(self._by_engine(component, recipe, **inputs), hours=6)

    def export(self, variant: str, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        component = _named(export, f"export-{variant}")
        return on_cpu(self._by_engine(component, recipe, **inputs), hours=2)

    def gate(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return waiting(self._task(gate, recipe, **inputs), hours=0.5)

    def choose(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return on_cpu(self._task(choose, recipe, **inputs), hours=2)

    def deploy(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        task = on_cpu(self._task(deploy, recipe, **inputs), hours=1)
        return task.set_caching_options(False)  # it has side effects: never cached

    def challenge(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        task = on_cpu(self._task(challenge, recipe, **inputs), hours=6)
        return task.set_caching_options(False)  # what is in production changes

    def release(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        task = on_cpu(self._task(release, recipe, **inputs), hours=2)
        # A release that was refused or rolled back must not be retried.
        return task.set_caching_options(False).set_retry(0)

    def report(self, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return waiting(self._task(report, recipe, **inputs), hours=1)

    def compare(
        self, recipe: str, variants: dict[str, Any], data: Any, cloze: str
    ) -> dict[str, Any]:
        """Evaluate and export every variant alike; the results are inputs of `report`."""
        results = {}
        for variant, model in variants.items():
            scored = self.evaluate(variant, recipe, model=model, data=data, cloze=cloze)
            exported = self.export(variant, recipe, model=model, data=data)
            results |= {
                f"{variant}_model": model,
                f"{variant}_evaluation": scored.outputs["evaluation"],
                f"{variant}_export": exported.outputs["exported"],
            }
        return results

    def ship(
        self, recipe: str, data: Any, results: dict[str, Any], cloze: str, production: str
    ) -> None:
        """Deploy the INT8 model if it is as good as the dense one, and report either way; where
        `production` names the releases, make it live if it is as good as the live one, too.

        The report is in both branches, since nothing outside of a branch can use its outputs.
        """
        passed = self.gate(
            recipe, baseline=results["dense_evaluation"], candidate=results["int8_evaluation"]
        ).outputs["Output"]
        exported, model = results["int8_export"], results["int8_model"]
        with dsl.If(passed == True, "gate-passed"):  # noqa: E712
            deployed = self.deploy(recipe, exported=exported, model=model, data=data)
            self.report(recipe, deployed=deployed.outputs["deployed"], **results)
            with dsl.If(production != "", "to-production"):
                scores = results["int8_evaluation"]
                better = self.challenge(
                    recipe, production=production, candidate=scores, data=data, cloze=cloze
                ).outputs["Output"]
                with dsl.If(better == True, "as-good-as-live"):  # noqa: E712
                    inputs = {"deployed": deployed.outputs["deployed"], "evaluation": scores}
                    self.release(recipe, production=production, **inputs)
        with dsl.Else("gate-failed"):
            self.report(recipe, **results)

    def _by_engine(self, component: Any, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return with_engine(self._task(component, recipe, **inputs))

    def _task(self, component: Any, recipe: str, **inputs: Any) -> dsl.PipelineTask:
        return component(recipe=recipe, overrides=self.overrides, **inputs)


def imported(model: str) -> Any:
    """The checkpoint folder at a path or address, as an artifact."""
    task = dsl.importer(artifact_uri=model, artifact_class=dsl.Model, reimport=False)
    return task.output


def _named(component: Any, name: str) -> Any:
    """The component renamed: otherwise a pipeline's second `evaluate` would be `evaluate-2`."""
    clone = copy.deepcopy(component)
    clone.name = clone.component_spec.name = name
    return clone
