"""Model -> static ONNX graph, verified against the model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "cpu",
    hours=2,
    reads="weights",
    by_engine=True,
    seconds=6,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def export(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    exported: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Write the ONNX graph and verify its logits and tokens against the checkpoint's.

    Args:
        recipe: Name or path of the recipe (group Export).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to export.
        data: Token data set with the held-out text for verification prompts.
        exported: Folder with model.onnx, its configuration and tokenizer, and the verification
            results.
        metrics: Size in bytes, and largest difference of the logits.
        contents: Content identifiers of the initial weights, by address; the step fails if the
            contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe import backends

    with stage(recipe, overrides, contents) as settings:
        result = backends.of(settings).export(settings, *local(model, data), Path(exported.path))
        exported.metadata["format"] = "onnx"
        record(result, metrics, exported)
