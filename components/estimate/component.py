"""Model -> quality cost of every choice for a smaller design."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "gpu",
    hours=6,
    reads="weights",
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def estimate(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    costs: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Estimate the cost of removing units and quantizing linears from gradients, before training.

    Args:
        recipe: Name or path of the recipe (groups Sensitivity and Compress.Quantization).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Dense checkpoint folder.
        data: Token data set to calibrate on.
        costs: JSON file with the costs of all choices, nats per token.
        metrics: The cost of quantizing every linear, by format.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.search.prices import write_costs

    with stage(recipe, overrides, contents) as settings:
        table = write_costs(settings, *local(model, data), Path(costs.path))
        record(table.totals(), metrics, costs)
