"""Model -> the best smaller model that meets a target, on Triton."""

from typing import NamedTuple

from kfp import dsl

from components.choose.component import choose
from components.deploy.component import deploy
from components.design.component import design
from components.estimate.component import estimate
from components.evaluate.component import evaluate
from components.export.component import export
from components.price.component import price
from components.prune.component import prune
from components.quantize.component import quantize
from components.report.component import report
from pipelines.steps.steps import Steps, imported


def compress(
    steps: Steps,
    model: str,
    recipe: str = "tiny",
    prune_recipe: str = "tiny-prune",
    qat_recipe: str = "tiny-qat",
    corpus: str = "",
    cloze: str = "",
    target: str = "latency=0.6",
    budget: str = "perplexity=0.1",
    trials: int = 2,
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Search for the best model that meets a target, as `lathe compress` does, and deploy it.

    Args:
        model: Path or address of a dense checkpoint folder.
        recipe: Name or path of the recipe that evaluates, exports and serves.
        prune_recipe: Name or path of the pruning recipe.
        qat_recipe: Name or path of the quantization recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        target: TARGET=SHARE of the dense model: latency, prefill, bytes or parameters.
        budget: accuracy=-POINTS, or perplexity=RELATIVE INCREASE.
        trials: Maximum number of designs to train, in parallel; bytes and parameters need only one.
        overrides: Settings that replace every recipe's, as `Group.key=value`.
    """
    recipes = {"prune_recipe": prune_recipe, "qat_recipe": qat_recipe}
    steps.look_up(recipe, overrides, corpus=corpus, model=model, cloze=cloze, **recipes)

    dense = imported(model)
    data = steps.prepare(model=dense).outputs["data"]
    # Target and budget are relative to these figures.
    measured = steps.group(measure, model=dense, data=data, cloze=cloze).outputs
    designed = steps.add(
        design,
        prune_recipe=steps.resolved["prune"],
        qat_recipe=steps.resolved["quantize"],
        model=dense,
        exported=measured["exported"],
        costs=measured["costs"],
        prices=measured["prices"],
        target=target,
        budget=budget,
        trials=trials,
    ).outputs
    steps.group(
        search,
        proposed=designed["Output"],
        designs=designed["designs"],
        model=dense,
        evaluation=measured["evaluation"],
        exported=measured["exported"],
        data=data,
        cloze=cloze,
        target=target,
        budget=budget,
    )


class Measured(NamedTuple):
    """The outputs of `measure`."""

    evaluation: dsl.Dataset
    exported: dsl.Model
    costs: dsl.Artifact
    prices: dsl.Artifact


def measure(
    steps: Steps, model: dsl.Input[dsl.Model], data: dsl.Input[dsl.Dataset], cloze: str
) -> Measured:
    """A sub-pipeline: evaluate and export the dense model, and measure the quality costs and prices
    of its parts."""
    scored = steps.add(evaluate, "dense", model=model, data=data, cloze=cloze)
    exported = steps.add(export, "dense", model=model, data=data).outputs["exported"]
    costs = steps.add(estimate, model=model, data=data).outputs["costs"]
    qat_recipe = steps.resolved["quantize"]
    priced = steps.add(price, qat_recipe=qat_recipe, model=model, costs=costs, exported=exported)
    return Measured(
        evaluation=scored.outputs["evaluation"],
        exported=exported,
        costs=costs,
        prices=priced.outputs["prices"],
    )


def search(
    steps: Steps,
    proposed: list[str],
    designs: dsl.Input[dsl.Artifact],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Dataset],
    exported: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    cloze: str,
    target: str,
    budget: str,
) -> None:
    """A sub-pipeline: train every design, rehearse the deployment of the best model, and report on
    it."""
    # A resumed run that has chosen needs no trials.
    trials = {}
    if choose.name not in steps.variant.finished:
        with dsl.ParallelFor(proposed, name="trials") as trial:
            pruned = steps.add(prune, model=model, data=data, design=trial).outputs["pruned"]
            small = steps.add(quantize, model=pruned, data=data, design=trial).outputs["quantized"]
            scored = steps.add(
                evaluate, "int8", model=small, data=data, reference=model, cloze=cloze
            ).outputs["evaluation"]
            graph = steps.add(export, "int8", model=small, data=data).outputs["exported"]
        trials = {
            "models": dsl.Collected(small),
            "evaluations": dsl.Collected(scored),
            "exports": dsl.Collected(graph),
        }
    dense = {"dense_evaluation": evaluation, "dense_export": exported}
    best = steps.add(
        choose, designs=designs, target=target, budget=budget, **dense, **trials
    ).outputs
    rehearsed = steps.add(deploy, exported=best["exported"], model=best["chosen"], data=data)
    steps.add(
        report,
        **dense,
        dense_model=model,
        int8_model=best["chosen"],
        int8_evaluation=best["evaluation"],
        int8_export=best["exported"],
        deployed=rehearsed.outputs["deployed"],
    )
