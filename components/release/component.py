"""Rehearsed repository -> release in production, if it is as good as the live one."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


# What is live changes, and a release that was refused or rolled back must not be retried.
@step(
    "cpu",
    hours=6,
    is_cached=False,
    retries=0,
    trusts=True,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def release(
    recipe: str,
    production: str,
    deployed: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    gate: dsl.Input[dsl.Artifact],
    model: dsl.Input[dsl.Model],
    verdict: dsl.Output[dsl.Artifact],
    released: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    cloze: str = "",
    overrides: list[str] = [],  # noqa: B006
):
    """Publish a model that is as good as the live one, and roll the Deployment to it.

    Args:
        recipe: Name or path of the recipe (groups Production, Offline_Eval, Gate and Serving).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        production: Address of the releases.
        deployed: The rehearsal of the deployment, with the repository.
        evaluation: Evaluation of the model, whose figures are stored with the release.
        data: Token data set of that evaluation.
        model: The checkpoint, for the model card and the bills of materials of the release.
        gate: The gate's verdict on the model, for Production.require.
        cloze: LAMBADA-format file of that evaluation; the data set's when empty.
        verdict: JSON file with the comparison with the live release: pass, fail or inconclusive,
            with intervals.
        released: JSON file with the release, its address, and the previously live one; absent if
            the live one stays.
        metrics: Golden prompts reproduced, malformed requests rejected, 99th percentiles under
            load.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.release.challenge import succeed
    from lathe_base.artifacts.remote import input_path

    with stage(recipe, [*overrides, f"Production.releases={production}"], restarts=0) as settings:
        *folders, passed, checkpoint = local(deployed, evaluation, data, gate, model)
        examples = input_path(cloze) if cloze else None
        made = succeed(settings, *folders, examples, Path(verdict.path), passed, checkpoint)
        if made:
            Path(released.path).write_text(made.to_json())
            record(made.acceptance, metrics, verdict, released)
        else:
            record({"released": False}, metrics, verdict)
