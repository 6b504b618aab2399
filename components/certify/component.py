"""Training recipe, token data set -> proof that killed training resumes to the same model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "node",
    hours=240,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def certify(
    recipe: str,
    data: dsl.Input[dsl.Dataset],
    kills: int,
    certificate: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    seed: int = 0,
    overrides: list[str] = [],  # noqa: B006
):
    """Train twice, killing the second training repeatedly, and compare both models bit for bit.

    Args:
        recipe: Name or path of the training recipe.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        data: Token data set.
        kills: Number of times to kill the training.
        seed: Random seed of the kinds and moments of the kills.
        certificate: JSON file with every kill, and the digests of every tensor of both models.
        page: The verdict, and every attempt.
        metrics: Number of kills, and 1 if both models are identical, else 0.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from lathe.release.certify.resume import certify_resume
    from lathe.report.training import certificate_page

    overrides = [*overrides, "Launch.nodes=1"]  # processes of another machine cannot be killed
    with stage(recipe, overrides, restarts=0) as settings:
        (folder,) = local(data)
        command = options(recipe, overrides)
        result = certify_resume(settings, command, folder, Path(certificate.path), kills, seed)
        certificate_page(Path(certificate.path), Path(page.path))
        record({"kills": len(result.kills), "passed": result.passed}, metrics, certificate, page)
        result.require()
