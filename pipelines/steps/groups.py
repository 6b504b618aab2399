"""Parts that several pipelines have in common."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp import dsl

from components.analyze.component import analyze
from components.deploy.component import deploy
from components.gate.component import gate
from components.quantize.component import quantize
from components.release.component import release
from pipelines.steps.steps import Steps


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
