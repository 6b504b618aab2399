"""Puts a rehearsed repository into production, and rolls back to an earlier one.

A release is published, tested from the bytes in the store, rolled out, and only then does the
pointer name it. If the process is interrupted, the pointer still names a working release, and
running it again resumes.
"""

import json
import logging
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from lathe.release.acceptance import Acceptance, accept, provenance_checks
from lathe.release.golden import make_golden
from lathe.release.release import SHORT, Releases, open_releases
from lathe.report.cards.audit import require_audited
from lathe.report.cards.release import write_release_documents
from lathe_base.artifacts.kinds import release_digests, release_name
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.chain import require
from lathe_base.provenance.keys import trusted_keys
from lathe_base.provenance.step import attest, materials, now
from lathe_base.tracking.models import register_release
from lathe_launch.cluster.rollout import Deployment, has_cluster, roll
from lathe_serving.repository import remove_bytecode, require_whole

log = logging.getLogger("lathe")

REPOSITORY = "repository"


class LiveReleaseChanged(UserError):
    """The live release is not the one that the candidate was compared with."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint, Code.CHANGED)


@dataclass(frozen=True)
class Production:
    """The state of production after a deployment or a rollback.

    Attributes:
        address: the release's, in the object store.
        before: name of the release that was live; None before the first.
        rolled: whether a Deployment was rolled; False if there is none.
        acceptance: None for a rollback.
    """

    release: str
    address: str
    before: str | None
    rolled: bool
    acceptance: Acceptance | None = None

    def to_json(self) -> str:
        """The result as JSON, for a file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def publish_release(
    recipe: Recipe,
    deployed: Path,
    evaluation: Path | None = None,
    verdict: Path | None = None,
    model: Path | None = None,
    replaces: str | None = None,
) -> Production:
    """Publish a rehearsed repository, test the published bytes, make them live, and register them
    if there is a model registry.

    Args:
        recipe: groups Production and Serving (the model's name).
        deployed: output of `lathe deploy`.
        evaluation: evaluation folder of the checkpoint, whose figures are stored with the release.
        verdict: file of `lathe gate`, which the release's attestation refers to.
        model: the checkpoint, for the model card and the bills of materials of the release.
        replaces: name of the live release, which the candidate was compared with; None: none is.

    Raises:
        LiveReleaseChanged: another release is live; it stays live.
        UserError: the store, the cluster or a folder is not usable.
        StageError: the release fails its tests or `Production.require`, or does not become ready;
            the previous one stays live.
    """
    releases, deployment = open_releases(recipe), _deployment(recipe.Production)
    golden = make_golden(deployed, evaluation)
    require_whole(deployed / REPOSITORY)
    remove_bytecode(deployed / REPOSITORY)  # of a server that still runs on it
    # The rehearsed repository has to be signed before the release gets its own signature.
    wanted = [name for name in recipe.Production.require if name == "signature"]
    require(deployed / REPOSITORY, wanted, trusted_keys(recipe.Production.keys))
    with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
        folder = Path(scratch) / recipe.Serving.model_name
        _compose(recipe, folder, deployed, evaluation, verdict, model)
        _require(recipe.Production, folder)
        live = releases.pointer().live_release
        _require_replaceable(releases, release_name(folder), live, replaces)
        release = releases.publish(folder, golden)
    acceptance = accept(releases, release, recipe)
    seconds = recipe.Production.rollout_seconds
    before = _make_live(releases, release, deployment, seconds, replaces)
    address = releases.address(release)
    register_release(recipe.Serving.model_name, release, address, golden.figures)
    return Production(release, address, before, deployment is not None, acceptance)


def roll_back(recipe: Recipe, to: str | None = None) -> Production:
    """Make the previous release live again, or any other that was live.

    Args:
        to: its digest or a prefix of it.

    Raises:
        UserError: there is no such release, or it was never live.
        StageError: it fails `Production.require` or does not become ready; the live one stays live.
    """
    releases, deployment = open_releases(recipe), _deployment(recipe.Production)
    pointer = releases.pointer()
    previous = pointer.previous
    if to is None:
        if not previous:
            raise UserError(
                f"{releases.root}: no release was live before the current one",
                "choose one from `lathe release list` with --to",
                Code.NOT_FOUND,
            )
        to = previous[0].release
    release = releases.find(to)
    if release not in {placed.release for placed in (pointer.live, *previous) if placed}:
        raise UserError(
            f"{releases.address(release)} was never live: it may never have been tested",
            "publish it with `lathe release publish`, which tests it",
            Code.NOT_PROVED,
        )
    if recipe.Production.require:
        with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
            _require(recipe.Production, releases.fetch(release, Path(scratch) / "repository"))
    seconds = recipe.Production.rollout_seconds
    before = _make_live(releases, release, deployment, seconds, pointer.live_release)
    return Production(release, releases.address(release), before, deployment is not None)


def _compose(
    recipe: Recipe,
    folder: Path,
    deployed: Path,
    evaluation: Path | None,
    verdict: Path | None,
    model: Path | None,
) -> None:
    """Copy the files of a repository to a new folder, describe them, and attest and sign all as a
    release."""
    started, repository = now(), deployed / REPOSITORY
    for name in release_digests(repository):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, folder / name)
    if model is not None:
        exported = repository / recipe.Serving.model_name / "1"
        write_release_documents(folder, model, exported, evaluation, verdict)
    artifacts = {"deployed": repository, "evaluation": evaluation, "verdict": verdict}
    inputs = [pair for name, path in artifacts.items() for pair in materials(name, path)]
    attest("release", recipe, folder, inputs, {}, started, release_digests(folder))


def _require(settings: ProductionSettings, folder: Path) -> None:
    if "audit" in settings.require:
        require_audited(folder, [Path(name) for name in settings.vex])
    require(folder, provenance_checks(settings), trusted_keys(settings.keys))


def releases_table(recipe: Recipe) -> Table:
    """All releases for a terminal, the newest first."""
    releases = open_releases(recipe)
    pointer = releases.pointer()
    table = Table("release", "published", "live", "perplexity", "cloze accuracy", "parameters")
    for name in releases.published():
        golden = releases.golden(name)
        times = [p.since for p in (pointer.live, *pointer.previous) if p and p.release == name]
        is_live = pointer.live is not None and pointer.live.release == name
        metrics = golden.figures
        table.add_row(
            name[:SHORT],
            _minute(golden.published),
            ("now, since " if is_live else "from ") + _minute(times[0]) if times else "",
            f"{metrics['perplexity']:.2f}" if "perplexity" in metrics else "",
            f"{metrics['cloze_accuracy']:.2%}" if "cloze_accuracy" in metrics else "",
            f"{metrics['parameters']:,.0f}" if "parameters" in metrics else "",
        )
    return table


def _deployment(settings: ProductionSettings) -> Deployment | None:
    if settings.deployment is not None and has_cluster():
        return Deployment(settings.namespace, settings.deployment)
    log.warning("no Deployment to roll: only the release pointer will be updated")
    return None


def _require_replaceable(
    releases: Releases, release: str, live: str | None, replaces: str | None
) -> None:
    if live not in (replaces, release):
        raise LiveReleaseChanged(
            f"{releases.address(release)} is to replace {replaces or 'nothing'}, but "
            f"{live or 'nothing'} is live now",
            "compare it with the live release, and publish it with "
            f"--replaces {live[:SHORT] if live else 'left out'}; see `lathe release list`",
        )


def _make_live(
    releases: Releases,
    release: str,
    deployment: Deployment | None,
    seconds: float,
    replaces: str | None,
) -> str | None:
    """Roll the Deployment, then update the pointer; returns the previously live release, which is
    the one to replace."""
    address = releases.address(release)
    with deployment.locked() if deployment else nullcontext():
        pointer = releases.pointer()
        before = pointer.live_release
        _require_replaceable(releases, release, before, replaces)
        if deployment is not None:
            running = deployment.release()
            back_to = releases.address(before) if before else running
            if running != back_to:
                log.warning("%s runs %s, not %s", deployment.name, running, back_to)
            roll(deployment, address, back_to, seconds)
            deployment.keep_lock()
        releases.point(pointer.moved_to(release, datetime.now(UTC)), seen=pointer)
    log.info("live: %s", address)
    return before


def _minute(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
