"""Model -> the best smaller model that meets a target, on Triton."""

from components.design.component import design
from pipelines.steps.groups import measure, search
from pipelines.steps.steps import Steps, imported, look_up


def compress(
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
    others = {"prune_recipe": prune_recipe, "qat_recipe": qat_recipe}
    found = look_up(recipe, overrides, corpus=corpus, model=model, cloze=cloze, **others)
    steps = Steps(overrides, found)
    dense = imported(model)
    data = steps.prepare(recipe, model=dense).outputs["data"]
    inputs = {"recipe": recipe, "qat_recipe": qat_recipe, "overrides": overrides, "cloze": cloze}
    inputs |= {"model": dense, "data": data}
    inputs |= {key: found[key] for key in ("weights", "scored")}
    measured = measure(**inputs).outputs
    known = {name: measured[name] for name in ("exported", "costs", "prices")}
    goal = {"target": target, "budget": budget, "prune_recipe": prune_recipe}
    designed = steps.add(
        design, recipe, qat_recipe=qat_recipe, trials=trials, model=dense, **known, **goal
    ).outputs
    known = {name: measured[name] for name in ("evaluation", "exported")}
    designs = {"proposed": designed["Output"], "designs": designed["designs"]}
    search(**inputs, **goal, **known, **designs)
