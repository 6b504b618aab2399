"""Exported model -> rehearsed Triton model repository."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "cpu",
    hours=1,
    name="rehearse",
    seconds=10,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def deploy(
    recipe: str,
    exported: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    deployed: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    overrides: list[str] = [],  # noqa: B006
):
    """Build a Triton model repository, start a server on it and compare its answers.

    Args:
        recipe: Name or path of the recipe (groups Serving, Generation, Export).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        exported: Folder of the exported model.
        model: The checkpoint to compare the served text with.
        data: Token data set with the held-out text for prompts.
        deployed: Folder with the Triton model repository and deploy.json, the rehearsal.
        metrics: Prompts answered like the checkpoint, latency and throughput.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.release.deploy import deploy

    with stage(recipe, overrides) as settings:
        graph, checkpoint, prompts = local(exported, model, data)
        result = deploy(settings, graph, checkpoint, Path(deployed.path), prompts)
        deployed.metadata["format"] = "triton"
        record(result, metrics, deployed)
