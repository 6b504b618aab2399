"""The sub-pipelines of the larger pipelines, each one node of the graph."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from components.analyze.component import analyze
from components.choose.component import choose
from components.deploy.component import deploy
from components.estimate.component import estimate
from components.evaluate.component import evaluate
from components.export.component import export
from components.gate.component import gate
from components.price.component import price
from components.prune.component import prune
from components.quantize.component import quantize
from components.release.component import release
from pipelines.steps.resources import compiled_variant
from pipelines.steps.steps import Steps


class Group:
    """A sub-pipeline, one node of the graph, which a pipeline calls like a component.

    KFP traces no pipeline within another, so groups are traced before the pipeline that they are
    part of, for the variant that is being compiled.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        functools.update_wrapper(self, function)

    def trace(self) -> None:
        """Trace the tasks for the variant that is being compiled."""
        self.traced: GraphComponent = dsl.pipeline(name=self.name)(self.function)

    def __call__(self, **inputs: Any) -> dsl.PipelineTask:
        return self.traced(**inputs)


def groups_of(pipeline: Callable[..., None]) -> list[Group]:
    """The groups that a pipeline calls: those that its module imports."""
    names = vars(inspect.getmodule(inspect.unwrap(pipeline)))
    return [value for value in names.values() if isinstance(value, Group)]


def group(name: str) -> Callable[[Callable[..., Any]], Group]:
    """Decorator that makes a function that adds steps a group with this name in the graph."""
    return functools.partial(Group, name)


class Measured(NamedTuple):
    """The outputs of `measure`."""

    evaluation: dsl.Dataset
    exported: dsl.Model
    costs: dsl.Artifact
    prices: dsl.Artifact


class Quantized(NamedTuple):
    """The outputs of `quantization`.

    The UI knows a line of its graph by the output's name and the task that reads it: an output
    `model` would hide the line of the dense model, which `judge` reads as well.
    """

    quantized: dsl.Model
    sensitivity: dsl.Dataset


@group("quantization")
def quantization(
    recipe: str,
    overrides: list[str],
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict[str, str],
) -> Quantized:
    """Rank the linear layers by the cost of INT8, and train the model in INT8."""
    steps = Steps(overrides, {"weights": weights})
    ranked = steps.add(analyze, recipe, model=model, data=data).outputs["sensitivity"]
    int8 = steps.add(quantize, recipe, model=model, data=data, sensitivity=ranked)
    return Quantized(quantized=int8.outputs["quantized"], sensitivity=ranked)


@group("measure")
def measure(
    recipe: str,
    qat_recipe: str,
    overrides: list[str],
    cloze: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict[str, str],
    scored: dict[str, str],
) -> Measured:
    """Evaluate and export the dense model, and measure the quality costs and prices of its
    parts."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    evaluated = steps.add(evaluate, recipe, "dense", model=model, data=data, cloze=cloze)
    exported = steps.add(export, recipe, "dense", model=model, data=data).outputs["exported"]
    costs = steps.add(estimate, qat_recipe, model=model, data=data).outputs["costs"]
    priced = steps.add(
        price, recipe, qat_recipe=qat_recipe, model=model, costs=costs, exported=exported
    )
    return Measured(
        evaluation=evaluated.outputs["evaluation"],
        exported=exported,
        costs=costs,
        prices=priced.outputs["prices"],
    )


@group("search")
def search(
    recipe: str,
    prune_recipe: str,
    qat_recipe: str,
    overrides: list[str],
    cloze: str,
    target: str,
    budget: str,
    proposed: list[str],
    designs: dsl.Input[dsl.Artifact],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Dataset],
    exported: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict[str, str],
    scored: dict[str, str],
) -> None:
    """Train every design, rehearse the deployment of the best model, and report on it."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    dense = {"dense_evaluation": evaluation, "dense_export": exported}
    trials: dict[str, Any] = {}
    if choose.name not in compiled_variant().finished:
        with dsl.ParallelFor(proposed, name="trials") as design:
            given = {"data": data, "design": design}
            pruned = steps.add(prune, prune_recipe, model=model, **given).outputs["pruned"]
            small = steps.add(quantize, qat_recipe, model=pruned, **given).outputs["quantized"]
            beside = {"data": data, "reference": model, "cloze": cloze}
            scores = steps.add(evaluate, recipe, "int8", model=small, **beside).outputs[
                "evaluation"
            ]
            graph = steps.add(export, recipe, "int8", model=small, data=data).outputs["exported"]
        made = {"models": small, "evaluations": scores, "exports": graph}
        trials = {name: dsl.Collected(outputs) for name, outputs in made.items()}
    goal = {"target": target, "budget": budget}
    best = steps.add(choose, recipe, designs=designs, **goal, **dense, **trials).outputs
    int8 = {"int8_evaluation": best["evaluation"], "int8_export": best["exported"]}
    rehearsed = steps.add(
        deploy, recipe, exported=best["exported"], model=best["chosen"], data=data
    )
    deployed = rehearsed.outputs["deployed"]
    models = {"dense": model, "int8": best["chosen"]}
    steps.report(recipe, models, deployed=deployed, **dense, **int8)


@group("judge")
def judge_pruned(
    recipe: str,
    overrides: list[str],
    cloze: str,
    data: dsl.Input[dsl.Dataset],
    weights: dict,  # type: ignore[type-arg]
    scored: dict,  # type: ignore[type-arg]
    dense: dsl.Input[dsl.Model],
    pruned: dsl.Input[dsl.Model],
) -> None:
    """Evaluate, export and compare the models, and report on them."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    models = {"dense": dense, "pruned": pruned}
    steps.report(recipe, models, **steps.compare(recipe, models, data, cloze))


@group("judge")
def judge_quantized(
    recipe: str,
    overrides: list[str],
    cloze: str,
    data: dsl.Input[dsl.Dataset],
    weights: dict,  # type: ignore[type-arg]
    scored: dict,  # type: ignore[type-arg]
    production: str,
    sensitivity: dsl.Input[dsl.Dataset],
    dense: dsl.Input[dsl.Model],
    int8: dsl.Input[dsl.Model],
) -> None:
    """Evaluate, export and compare the models, and report on them."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    models = {"dense": dense, "int8": int8}
    _judge_int8(steps, recipe, models, data, cloze, production, sensitivity)


@group("judge")
def judge_pruned_and_quantized(
    recipe: str,
    overrides: list[str],
    cloze: str,
    data: dsl.Input[dsl.Dataset],
    weights: dict,  # type: ignore[type-arg]
    scored: dict,  # type: ignore[type-arg]
    production: str,
    sensitivity: dsl.Input[dsl.Dataset],
    dense: dsl.Input[dsl.Model],
    pruned: dsl.Input[dsl.Model],
    int8: dsl.Input[dsl.Model],
) -> None:
    """Evaluate, export and compare the models, and report on them."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    models = {"dense": dense, "pruned": pruned, "int8": int8}
    _judge_int8(steps, recipe, models, data, cloze, production, sensitivity)


def _judge_int8(
    steps: Steps,
    recipe: str,
    models: dict[str, Any],
    data: Any,
    cloze: str,
    production: str,
    sensitivity: Any,
) -> None:
    """Evaluate and export all models, rehearse the deployment of the INT8 model, compare it with
    the dense one, and release it if it passes and `production` is set."""
    results = steps.compare(recipe, models, data, cloze)
    exported, evaluation = results["int8_export"], results["int8_evaluation"]
    read = {"data": data, "model": models["int8"]}
    deployed = steps.add(deploy, recipe, exported=exported, **read).outputs["deployed"]
    pair = {"baseline": results["dense_evaluation"], "candidate": evaluation}
    compared = steps.add(gate, recipe, production=production, **pair).outputs
    # KFP 2.17's local runner finds no other output of a step than `Output` in a condition.
    with dsl.If(compared["Output"] == True, "to-production"):  # noqa: E712
        read |= {"deployed": deployed, "evaluation": evaluation, "gate": compared["verdict"]}
        steps.add(release, recipe, production=production, cloze=cloze, **read)
    steps.report(recipe, models, **results, sensitivity=sensitivity, deployed=deployed)
