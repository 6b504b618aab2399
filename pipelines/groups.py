"""The sub-pipelines of the larger pipelines, each one node of the graph."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from pipelines.compiler.resources import compiled_variant
from pipelines.steps import CHOOSE, Steps


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


def quantization(
    recipe: str,
    overrides: list[str],
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict[str, str],
) -> Quantized:
    """Rank the linear layers by the cost of INT8, and train the model in INT8."""
    steps = Steps(overrides, {"weights": weights})
    ranked = steps.analyze(recipe, model=model, data=data).outputs["sensitivity"]
    int8 = steps.quantize(recipe, model=model, data=data, sensitivity=ranked)
    return Quantized(quantized=int8.outputs["quantized"], sensitivity=ranked)


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
    evaluated = steps.evaluate(recipe, "dense", model=model, data=data, cloze=cloze)
    exported = steps.export(recipe, "dense", model=model, data=data).outputs["exported"]
    costs = steps.estimate(qat_recipe, model=model, data=data).outputs["costs"]
    priced = steps.price(recipe, qat_recipe=qat_recipe, model=model, costs=costs, exported=exported)
    return Measured(
        evaluation=evaluated.outputs["evaluation"],
        exported=exported,
        costs=costs,
        prices=priced.outputs["prices"],
    )


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
    if CHOOSE not in compiled_variant().finished:
        with dsl.ParallelFor(proposed, name="trials") as design:
            given = {"data": data, "design": design}
            pruned = steps.prune(prune_recipe, model=model, **given).outputs["pruned"]
            small = steps.quantize(qat_recipe, model=pruned, **given).outputs["quantized"]
            beside = {"data": data, "reference": model, "cloze": cloze}
            scores = steps.evaluate(recipe, "int8", model=small, **beside).outputs["evaluation"]
            graph = steps.export(recipe, "int8", model=small, data=data).outputs["exported"]
        made = {"models": small, "evaluations": scores, "exports": graph}
        trials = {name: dsl.Collected(outputs) for name, outputs in made.items()}
    goal = {"target": target, "budget": budget}
    best = steps.choose(recipe, designs=designs, **goal, **dense, **trials).outputs
    int8 = {"int8_evaluation": best["evaluation"], "int8_export": best["exported"]}
    rehearsed = steps.deploy(recipe, exported=best["exported"], model=best["chosen"], data=data)
    deployed = rehearsed.outputs["deployed"]
    models = {"dense": model, "int8": best["chosen"]}
    steps.report(recipe, models, deployed=deployed, **dense, **int8)


@functools.cache
def judge(variants: tuple[str, ...]) -> Callable[..., None]:
    """The pipeline that judges these models, of which the first is the dense one.

    It evaluates and exports all models, and writes the report. If the last one is the INT8 model,
    it also rehearses its deployment, compares it with the dense model, and releases it if it passes
    and `production` is set. All of this is one group, because the many artifacts between its steps
    would clutter the graph of the whole run.
    """
    inputs: dict[str, Any] = {"recipe": str, "overrides": list[str], "cloze": str}
    inputs |= {"data": dsl.Input[dsl.Dataset], "weights": dict, "scored": dict}
    if "int8" in variants:
        inputs |= {"production": str, "sensitivity": dsl.Input[dsl.Dataset]}
    inputs |= dict.fromkeys(variants, dsl.Input[dsl.Model])

    def judge(*values):  # type: ignore[no-untyped-def]
        """Evaluate, export and compare the models, and report on them."""
        given = dict(zip(inputs, values, strict=True))
        recipe, data, cloze = (given[key] for key in ("recipe", "data", "cloze"))
        steps = Steps(given["overrides"], {key: given[key] for key in ("weights", "scored")})
        models = {v: given[v] for v in variants}
        results = steps.compare(recipe, models, data, cloze)
        if "int8" in models:
            results["sensitivity"] = given["sensitivity"]
            results["deployed"] = _try_out(steps, given, results)
        steps.report(recipe, models, **results)

    # KFP reads the inputs from the signature, which depends on the variants.
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    judge.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, annotation=kind) for name, kind in inputs.items()]
    )
    return judge


def _try_out(steps: Steps, given: dict[str, Any], results: dict[str, Any]) -> Any:
    """Rehearse the deployment of the INT8 model, and release it if it passes the gate; returns the
    rehearsal's artifact."""
    recipe, model = given["recipe"], given["int8"]
    read = {"data": given["data"], "model": model}
    deployed = steps.deploy(recipe, exported=results["int8_export"], **read).outputs["deployed"]
    evaluation = results["int8_evaluation"]
    production = given["production"]
    pair = {"baseline": results["dense_evaluation"], "candidate": evaluation}
    compared = steps.gate(recipe, production=production, **pair).outputs
    # KFP 2.17's local runner finds no other output of a step than `Output` in a condition.
    with dsl.If(compared["Output"] == True, "to-production"):  # noqa: E712
        read |= {"deployed": deployed, "evaluation": evaluation, "gate": compared["verdict"]}
        steps.release(recipe, production=production, cloze=given["cloze"], **read)
    return deployed


def judged(models: dict[str, Any], found: Mapping[str, Any], **inputs: Any) -> dsl.PipelineTask:
    """The task that judges these models, the dense one first.

    Args:
        found: external inputs of the run; see `look_up`.
    """
    read = {key: found[key] for key in ("weights", "scored")}
    return part(judge(tuple(models)))(**models, **read, **inputs)


def quantized_and_judged(
    models: dict[str, Any],
    found: Mapping[str, Any],
    qat_recipe: str,
    *,
    overrides: list[str],
    data: Any,
    **inputs: Any,
) -> dsl.PipelineTask:
    """`judged`, with the last of the models quantized as one more: `int8`."""
    *_, model = models.values()
    quantized = part(quantization)(
        recipe=qat_recipe, overrides=overrides, model=model, data=data, weights=found["weights"]
    ).outputs
    read = {"overrides": overrides, "data": data, "sensitivity": quantized["sensitivity"]}
    return judged({**models, "int8": quantized["quantized"]}, found, **read, **inputs)


# KFP traces no pipeline within another: these have to be traced before those that they are part of.
_PARTS: ContextVar[Mapping[Callable[..., Any], GraphComponent]] = ContextVar("parts")


def has_parts(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare which groups a pipeline uses."""

    def declare(pipeline: Callable[..., Any]) -> Callable[..., Any]:
        pipeline.parts = functions  # type: ignore[attr-defined]
        return pipeline

    return declare


@contextmanager
def with_parts(pipeline: Callable[..., Any]) -> Iterator[None]:
    """Trace the groups of a pipeline, for the variant that is being compiled; the pipeline may be
    traced inside."""
    functions = getattr(pipeline, "parts", ())
    token = _PARTS.set({f: dsl.pipeline(name=f.__name__)(f) for f in functions})
    try:
        yield
    finally:
        _PARTS.reset(token)


def part(function: Callable[..., Any]) -> GraphComponent:
    """A group of the pipeline that is being traced."""
    return _PARTS.get()[function]
