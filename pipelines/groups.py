"""The parts of the larger pipelines, each a pipeline of its own and one node of the graph."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from pipelines.steps import Steps


class Trained(NamedTuple):
    """What `train` gives."""

    data: dsl.Dataset
    model: dsl.Model


class Measured(NamedTuple):
    """What `measure` gives."""

    evaluation: dsl.Dataset
    exported: dsl.Model
    costs: dsl.Artifact
    prices: dsl.Artifact


class Quantized(NamedTuple):
    """What `quantization` gives."""

    model: dsl.Model
    sensitivity: dsl.Dataset


def train(
    recipe: str,
    overrides: list[str],
    corpus: str,
    tokenizer: str,
    model: str,
    text: dict,  # type: ignore[type-arg]
    weights: dict,  # type: ignore[type-arg]
) -> Trained:
    """Prepare the data and train a GPT on it."""
    steps = Steps(overrides, {"corpus": corpus, "text": text, "weights": weights})
    data = steps.prepare(recipe, tokenizer=tokenizer).outputs["data"]
    trained = steps.pretrain(recipe, data=data, init=model)
    return Trained(data=data, model=trained.outputs["model"])


def quantization(
    recipe: str,
    overrides: list[str],
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict,  # type: ignore[type-arg]
) -> Quantized:
    """Rank the linear layers by what INT8 costs in them, and train the model in INT8."""
    steps = Steps(overrides, {"weights": weights})
    ranked = steps.analyze(recipe, model=model, data=data).outputs["sensitivity"]
    int8 = steps.quantize(recipe, model=model, data=data, sensitivity=ranked)
    return Quantized(model=int8.outputs["quantized"], sensitivity=ranked)


def measure(
    recipe: str,
    qat_recipe: str,
    overrides: list[str],
    cloze: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    weights: dict,  # type: ignore[type-arg]
    scored: dict,  # type: ignore[type-arg]
) -> Measured:
    """Evaluate and export the dense model, and find out what its parts are worth and take."""
    steps = Steps(overrides, {"weights": weights, "scored": scored})
    evaluated = steps.evaluate("dense", recipe, model=model, data=data, cloze=cloze)
    exported = steps.export("dense", recipe, model=model, data=data).outputs["exported"]
    costs = steps.estimate(qat_recipe, model=model, data=data).outputs["costs"]
    priced = steps.price(recipe, qat_recipe=qat_recipe, model=model, costs=costs, exported=exported)
    return Measured(
        evaluation=evaluated.outputs["evaluation"],
        exported=exported,
        costs=costs,
        prices=priced.outputs["prices"],
    )


def judge(variants: tuple[str, ...]) -> Callable[..., Any]:
    """The pipeline that measures these models, the dense one first and the INT8 one last.

    It evaluates and exports all alike, rehearses the deployment of the last, and compares the last
    with the first.
    """
    outputs = {f"{v}_evaluation": dsl.Dataset for v in variants}
    outputs |= {f"{v}_export": dsl.Model for v in variants} | {"deployed": dsl.Model}
    outputs |= {"verdict": dsl.Artifact}
    # KFP reads the inputs and outputs from the signature, which depends on the variants.
    judged = NamedTuple("Judged", [*outputs.items(), ("passed", bool)])  # type: ignore[misc]

    def judge(recipe, overrides, cloze, data, weights, scored, *given):  # type: ignore[no-untyped-def]
        """Measure the models, rehearse the deployment of the INT8 one, and say whether it is as
        good as the dense one."""
        steps = Steps(overrides, {"weights": weights, "scored": scored})
        models = dict(zip(variants, given, strict=True))
        results = steps.compare(recipe, models, data, cloze)
        last = {"exported": results["int8_export"], "model": models["int8"]}
        rehearsed = steps.rehearse(recipe, data=data, **last)
        compared = steps.gate(
            recipe, baseline=results["dense_evaluation"], candidate=results["int8_evaluation"]
        )
        return judged(
            **results,
            deployed=rehearsed.outputs["deployed"],
            verdict=compared.outputs["verdict"],
            passed=compared.outputs["Output"],
        )

    inputs: dict[str, Any] = {"recipe": str, "overrides": list[str], "cloze": str}
    inputs |= {"data": dsl.Input[dsl.Dataset], "weights": dict, "scored": dict}
    inputs |= {v: dsl.Input[dsl.Model] for v in variants}
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    judge.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, annotation=kind) for name, kind in inputs.items()],
        return_annotation=judged,
    )
    return judge


JUDGED = (("dense", "int8"), ("dense", "pruned", "int8"))


class Groups:
    """All of them, traced for the variant that is being compiled."""

    def __init__(self) -> None:
        self.train = _traced(train)
        self.quantization = _traced(quantization)
        self.measure = _traced(measure)
        self._judges = {variants: _traced(judge(variants)) for variants in JUDGED}

    def judge(self, models: dict[str, Any], **inputs: Any) -> dsl.PipelineTask:
        """The task that judges these models, the dense one first and the INT8 one last."""
        return self._judges[tuple(models)](**models, **inputs)


# KFP traces no pipeline within another: these have to be traced before those that they are part of.
_GROUPS: ContextVar[Groups] = ContextVar("groups")


@contextmanager
def with_groups() -> Iterator[None]:
    """Pipelines traced inside may use `groups()`."""
    token = _GROUPS.set(Groups())
    try:
        yield
    finally:
        _GROUPS.reset(token)


def groups() -> Groups:
    """The groups of the pipeline that is being traced."""
    return _GROUPS.get()


def judge_and_release(
    recipe: str,
    overrides: list[str],
    models: dict[str, Any],
    made: dict[str, Any],
    found: Mapping[str, Any],
    cloze: str,
    production: str,
) -> None:
    """Judge the models, report on them, and make the INT8 one live if it is as good as the dense
    one and `production` names the releases.

    Args:
        made: the outputs `data` and `sensitivity` of earlier steps.
        found: what the run reads from outside; see `look_up`.
    """
    steps, given = Steps(overrides, found), {"data": made["data"], "cloze": cloze}
    read = {key: found[key] for key in ("weights", "scored")}
    judged = dict(
        groups().judge(models, recipe=recipe, overrides=overrides, **given, **read).outputs
    )
    passed, verdict = judged.pop("passed"), judged.pop("verdict")
    steps.report(recipe, models, sensitivity=made["sensitivity"], **judged)
    with (
        dsl.If(production != "", "to-production"),
        dsl.If(passed == True, "gate-passed"),  # noqa: E712
    ):
        candidate = {"deployed": judged["deployed"], "evaluation": judged["int8_evaluation"]}
        candidate |= {"gate": verdict, "model": models["int8"]}
        steps.release(recipe, production=production, **candidate, **given)


def _traced(function: Callable[..., Any]) -> GraphComponent:
    return dsl.pipeline(name=function.__name__)(function)
