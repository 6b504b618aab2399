"""Exported model -> rehearsed Triton model repository."""

from kfp import dsl

from components.images import TRAIN


@dsl.component(base_image=TRAIN, install_kfp_package=False)
def deploy(
    recipe: str,
    overrides: list[str],
    exported: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    repository: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Build a Triton model repository, start a server on it and compare its answers.

    Args:
        recipe: Name or path of the recipe (group Serving).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        exported: Folder of the exported model.
        model: The checkpoint that the served text is compared with.
        repository: Triton model repository.
        metrics: Figures of the rehearsal.
    """
    from pathlib import Path

    from components.stage import record, stage
    from lathe.serve.deploy import deploy

    with stage(recipe, overrides) as settings:
        result = deploy(settings, Path(exported.path), Path(model.path), Path(repository.path))
        repository.metadata["format"] = "triton"
        record(result, metrics, repository)
