"""Pretrained model -> model finetuned on conversations."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "training",
    hours=72,
    reads="weights",
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def finetune(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    finetuned: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Train a pretrained model on conversations, wholly or with LoRA.

    Args:
        recipe: Name or path of the recipe (group Finetune and those of training).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder or Hugging Face model to begin from.
        data: Token data set of conversations, or of text.
        finetuned: Checkpoint folder, with the adapters of LoRA merged into its weights.
        page: The loss curve, and answers before and after.
        metrics: Steps, loss, perplexity at the first and last evaluation, tokens per second.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from components.training import train
    from lathe.train.finetune import finetune

    with stage(recipe, overrides, contents) as settings:
        command = ["finetune", model, "--data", data, "--output", finetuned]
        command += options(recipe, overrides)

        def work():
            return finetune(settings, *local(model, data), Path(finetuned.path))

        record(train(settings, command, finetuned, page, work), metrics, finetuned, page)
