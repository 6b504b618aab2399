"""Costs and prices -> the designs worth training."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "cpu",
    hours=2,
    reads="weights",
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def design(
    recipe: str,
    prune_recipe: str,
    qat_recipe: str,
    target: str,
    budget: str,
    trials: int,
    model: dsl.Input[dsl.Model],
    exported: dsl.Input[dsl.Model],
    costs: dsl.Input[dsl.Artifact],
    prices: dsl.Input[dsl.Artifact],
    designs: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
) -> list[str]:
    """Choose the widths of all layers and the formats of all linears by an integer program.

    Args:
        recipe: Name or path of the recipe that exports (group Export).
        prune_recipe: Name or path of the pruning recipe (group Compress.Prune).
        qat_recipe: Name or path of the quantization recipe (group Compress.Quantization).
        overrides: Settings that replace every recipe's, as `Group.key=value`.
        target: TARGET=SHARE of the dense model: latency, prefill, bytes or parameters.
        budget: accuracy=-POINTS, or perplexity=RELATIVE INCREASE.
        trials: Maximum number of designs; bytes and parameters need only one.
        model: Dense checkpoint folder.
        exported: Its ONNX folder.
        costs: Quality cost of every choice.
        prices: Price of every part in terms of the target.
        designs: JSON file with the designs and predictions.
        metrics: Predictions for the first design.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.

    Returns:
        The designs as JSON, the largest first.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.search.design import parse_goal
    from lathe.search.proposals import write_designs
    from lathe_base.config.recipe import load_recipe

    with stage(recipe, overrides, contents) as base:
        recipes = base, *(load_recipe(name, overrides) for name in (prune_recipe, qat_recipe))
        goal, inputs = parse_goal(target, budget), local(model, exported, costs, prices)
        proposals = write_designs(goal, recipes, *inputs, trials, Path(designs.path))
        record(vars(proposals[0]) | {"designs": len(proposals)}, metrics, designs)
        return [proposal.design.to_json() for proposal in proposals]
