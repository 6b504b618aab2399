"""Model -> sensitivity of its linear layers to INT8."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "gpu",
    hours=6,
    reads="weights",
    by_engine=True,
    seconds=15,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def analyze(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    sensitivity: dsl.Output[dsl.Dataset],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Rank linear layers by the quality cost of INT8, and choose the fewest to keep in float.

    Args:
        recipe: Name or path of the recipe (groups Sensitivity and Compress.Quantization).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to analyze.
        data: Token data set to calibrate and measure on.
        sensitivity: Folder with the ranking and the format of every layer.
        page: Charts of the cost of INT8 in every layer, and of the distributions of weights and
            inputs.
        metrics: Baseline, budget, predicted cost, and rank correlation with the estimate.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    import shutil
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe import backends
    from lathe.compress.sensitivity.result import PAGE

    with stage(recipe, overrides, contents) as settings:
        folder = Path(sensitivity.path)
        result = backends.of(settings).analyze(settings, *local(model, data), folder)
        shutil.copyfile(folder / PAGE, page.path)
        record(result, metrics, sensitivity, page)
