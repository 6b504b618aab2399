"""Model -> prices of a design's parts for every target."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("cpu", hours=2, reads="weights")
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def price(
    recipe: str,
    qat_recipe: str,
    model: dsl.Input[dsl.Model],
    costs: dsl.Input[dsl.Artifact],
    exported: dsl.Input[dsl.Model],
    prices: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Measure a dozen untrained exports of the model, pruned and quantized in different ways.

    Args:
        recipe: Name or path of the recipe that exports (group Export).
        qat_recipe: Name or path of the quantization recipe (group Compress.Quantization).
        overrides: Settings that replace both recipes', as `Group.key=value`.
        model: Dense checkpoint folder.
        costs: Output of `estimate`, which determines the formats.
        exported: Its ONNX folder.
        prices: JSON file with the prices of all parts by target, as shares of the dense model's
            total.
        metrics: The fixed share of each target, which no design can reduce.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.search.prices import write_prices
    from lathe_base.config.recipe import load_recipe

    with stage(recipe, overrides, contents) as settings:
        recipes = settings, load_recipe(qat_recipe, overrides)
        price_table = write_prices(*recipes, *local(model, costs, exported), Path(prices.path))
        record(
            {target: price_row.of.get("fixed", 0.0) for target, price_row in price_table.items()},
            metrics,
            prices,
        )
