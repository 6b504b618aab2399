"""Token data set -> trained model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "training",
    hours=240,
    reads="weights",
    seconds=110,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def pretrain(
    recipe: str,
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    init: str = "",
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Train a GPT, from scratch or from a checkpoint.

    Args:
        recipe: Name or path of the recipe (groups Model, Engine, Optimizer, Data).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        data: Token data set.
        init: Checkpoint folder with the initial weights; random weights when empty.
        model: Checkpoint folder with the training log.
        page: The loss curve.
        metrics: Steps, loss, perplexity at the first and last evaluation, tokens per second.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from components.training import train
    from lathe.train.pretrain import pretrain
    from lathe_base.artifacts.remote import input_path

    with stage(recipe, overrides, contents) as settings:
        command = ["pretrain", "--data", data, "--output", model, *options(recipe, overrides)]
        command += ["--init", init] if init else []

        def work():
            start = input_path(init) if init else None
            return pretrain(settings, *local(data), Path(model.path), start)

        record(train(settings, command, model, page, work), metrics, model, page)
