"""Model -> static ONNX graph, proven against the model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("cpu", hours=2, copies=10, reads="weights", by_engine=True, seconds=6)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def export(
    recipe: str,
    overrides: list[str],
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    exported: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    contents: dict = {},  # noqa: B006
):
    """Write the ONNX graph and prove that it gives the checkpoint's logits and tokens.

    Args:
        recipe: Name or path of the recipe (group Export).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to export.
        data: Token data set whose held-out text gives the prompts of the proof.
        exported: Folder with model.onnx, its configuration and tokenizer, and the proof.
        metrics: Bytes and largest difference of the logits.
        contents: What identifies the weights that the run starts from, by address, on which the
            result depends; the step fails if it finds something else there.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe import backends

    with stage(recipe, overrides, contents) as settings:
        result = backends.of(settings).export(settings, *local(model, data), Path(exported.path))
        exported.metadata["format"] = "onnx"
        record(result, metrics, exported)
