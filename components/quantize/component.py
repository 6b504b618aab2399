"""Model -> INT8 model by quantization-aware training."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "training",
    hours=72,
    reads="weights",
    by_engine=True,
    seconds=21,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def quantize(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    quantized: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    sensitivity: dsl.Input[dsl.Dataset] = None,
    design: str = "",
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Train with fake quantization: INT8 weights and activations.

    Args:
        recipe: Name or path of the recipe (group Compress.Quantization and those of training).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to quantize.
        data: Token data set to train on.
        quantized: Checkpoint folder with the quantization plan.
        page: The loss curve.
        metrics: Loss and perplexity.
        sensitivity: The sensitivity analysis whose choice of formats is applied.
        design: A design of the component `design`, whose formats replace the recipe's and the
            analysis.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from components.training import train
    from lathe import backends
    from lathe.search.design import quantization_to

    with stage(recipe, overrides, contents) as settings:
        if design:
            settings, overrides = quantization_to(design, settings, overrides, *local(model))
        command = ["quantize", model, "--data", data, *options(recipe, overrides)]
        command += ["--output", quantized, *(["--sensitivity", sensitivity] if sensitivity else [])]

        def work():
            inputs, output = local(model, data), Path(quantized.path)
            return backends.of(settings).quantize(settings, *inputs, output, *local(sensitivity))

        record(train(settings, command, quantized, page, work), metrics, quantized, page)
