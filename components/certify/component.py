"""Training recipe, token data set -> proof that a killed training resumes to the same model."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("training node", hours=240)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def certify(
    recipe: str,
    overrides: list[str],
    data: dsl.Input[dsl.Dataset],
    kills: int,
    certificate: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    seed: int = 0,
):
    """Train twice, kill the second training again and again, and compare both models to the bit.

    Args:
        recipe: Name or path of the training recipe.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        data: Token data set.
        kills: How often the training is killed.
        seed: From which the kinds and moments of the kills are drawn.
        certificate: JSON file with every kill, and the digests of every tensor of both models.
        page: The verdict, and every attempt.
        metrics: Kills, and 1 when both models are the same, else 0.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import options, stage
    from lathe.production.certify.resume import certify_resume
    from lathe.report.certificate import certificate_page

    overrides = [*overrides, "Launch.nodes=1"]  # processes of another machine cannot be killed
    with stage(recipe, overrides, restarts=0) as settings:
        (folder,) = local(data)
        command = options(recipe, overrides)
        found = certify_resume(settings, command, folder, Path(certificate.path), kills, seed)
        certificate_page(Path(certificate.path), Path(page.path))
        record({"kills": len(found.kills), "passed": found.passed}, metrics, certificate, page)
        found.require()
