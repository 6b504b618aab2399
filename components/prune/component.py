"""Model -> pruned and finetuned model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "training",
    hours=72,
    reads="weights",
    by_engine=True,
    seconds=38,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def prune(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    pruned: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    design: str = "",
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Remove whole attention heads and feed-forward channels, then finetune.

    Args:
        recipe: Name or path of the recipe (group Compress.Prune and those of training).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to prune.
        data: Token data set to finetune on.
        pruned: Checkpoint folder of the smaller model.
        page: The loss curve.
        metrics: Parameters before and after, loss and perplexity.
        design: A design of the component `design`, whose widths replace the recipe's. If it does
            not prune anything, the output is a copy of the model.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from components.training import copy_checkpoint, train
    from lathe import backends
    from lathe.search.design import pruning_to

    with stage(recipe, overrides, contents) as settings:
        if design:
            settings, overrides = pruning_to(design, settings, overrides, *local(model))
        if settings is None:
            return record(copy_checkpoint(model, pruned, page), metrics, pruned, page)
        command = ["prune", model, "--data", data, "--output", pruned, *options(recipe, overrides)]

        def work():
            return backends.of(settings).prune(settings, *local(model, data), Path(pruned.path))

        record(train(settings, command, pruned, page, work), metrics, pruned, page)
