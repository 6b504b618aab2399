"""Model -> the best INT8 model that meets a target, on Triton."""

from kfp import dsl

from pipelines.steps import Steps, imported, look_up


def compress(
    model: str,
    recipe: str = "tiny",
    prune_recipe: str = "tiny-prune",
    qat_recipe: str = "tiny-qat",
    corpus: str = "",
    cloze: str = "",
    target: str = "latency=0.6",
    budget: str = "perplexity=0.1",
    ratios: list[float] = [0.125, 0.25, 0.375, 0.5],  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Prune by several ratios at once, quantize each to INT8, and deploy the best.

    Args:
        model: Path or address of a dense checkpoint folder.
        recipe: Name or path of the recipe that evaluates, exports and serves.
        prune_recipe: Name or path of the pruning recipe.
        qat_recipe: Name or path of the quantization recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        target: latency, prefill, bytes or parameters, and a share of the dense model's.
        budget: accuracy=-POINTS, or perplexity=RELATIVE INCREASE.
        ratios: Shares of heads and channels to prune, one a trial.
        overrides: Settings that replace every recipe's, as `Group.key=value`.
    """
    recipes = [recipe, prune_recipe, qat_recipe]
    found = look_up(recipes, overrides, corpus=corpus, model=model, cloze=cloze)
    steps = Steps(overrides, found)
    dense = imported(model)
    data = steps.prepare(recipe, model=dense).outputs["data"]
    scored = steps.evaluate("dense", recipe, model=dense, data=data, cloze=cloze)
    exported = steps.export("dense", recipe, model=dense, data=data)
    with dsl.ParallelFor(ratios, name="trials") as ratio:
        pruned = steps.prune(prune_recipe, model=dense, data=data, ratio=ratio).outputs["pruned"]
        ranked = steps.analyze(qat_recipe, model=pruned, data=data).outputs["sensitivity"]
        int8 = steps.quantize(qat_recipe, model=pruned, data=data, sensitivity=ranked)
        quantized = int8.outputs["quantized"]
        trial_scored = steps.evaluate(
            "int8", recipe, model=quantized, data=data, reference=dense, cloze=cloze
        )
        trial_exported = steps.export("int8", recipe, model=quantized, data=data)
    best = steps.choose(
        recipe,
        target=target,
        budget=budget,
        ratios=ratios,
        dense_evaluation=scored.outputs["evaluation"],
        dense_export=exported.outputs["exported"],
        models=dsl.Collected(quantized),
        evaluations=dsl.Collected(trial_scored.outputs["evaluation"]),
        exports=dsl.Collected(trial_exported.outputs["exported"]),
    )
    steps.rehearse(
        recipe, exported=best.outputs["exported"], model=best.outputs["chosen"], data=data
    )
