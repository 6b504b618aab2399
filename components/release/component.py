"""Rehearsed repository -> release in production."""

from kfp import dsl

from components.images import TRAIN


@dsl.component(base_image=TRAIN, install_kfp_package=False)
def release(
    recipe: str,
    overrides: list[str],
    production: str,
    deployed: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Dataset],
    released: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Publish a model repository, test the published bytes, and roll the Deployment to them.

    Args:
        recipe: Name or path of the recipe (groups Production and Serving).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        production: Address of the releases.
        deployed: The rehearsal of the deployment, with the repository.
        evaluation: Of the model, whose figures the release keeps.
        released: JSON file: the release, its address, and the one that was live before.
        metrics: Golden prompts answered, requests refused, 99th percentiles under load.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.production.publish import publish_release

    with stage(recipe, [*overrides, f"Production.releases={production}"], restarts=0) as settings:
        made = publish_release(settings, *local(deployed, evaluation))
        Path(released.path).write_text(made.to_json())
        record(made.acceptance, metrics, released)
