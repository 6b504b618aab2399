"""Releases from repository to production, with a real object store and a real Triton server."""

import json
import os
import shutil
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lathe.cli import app
from lathe.release import publish as production
from lathe.release.deploy import deploy
from lathe.release.publish import LiveReleaseChanged, publish_release, roll_back
from lathe.release.release import Golden, Pointer, Releases, open_releases, release_name
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import Code, StageError
from lathe_base.storage import digest, list_uris, read_text, write_text
from tests.support import warm
from tests.support.errors import raises
from tests.support.small_release import RECIPE

pytestmark = pytest.mark.usefixtures("no_cluster")


def make_recipe(s3: str, **changes: object) -> Recipe:
    settings = {"releases": f"{s3}/releases", "burst_seconds": 0.5, "burst_clients": 4} | changes
    return RECIPE.model_copy(update={"Production": ProductionSettings(**settings)})


@pytest.fixture
def recipe(s3: str) -> Recipe:
    return make_recipe(s3)


@pytest.fixture
def releases(recipe: Recipe) -> Releases:
    return open_releases(recipe)


def live(releases: Releases) -> str | None:
    pointer = releases.pointer()
    return pointer.live and pointer.live.release


@pytest.mark.slow
def test_deploy_again_another_and_back(
    recipe: Recipe, releases: Releases, deployed: Path, other_deployed: Path, s3: str
) -> None:
    made = publish_release(recipe, deployed)
    assert (made.release, made.before, made.rolled) == (
        release_name(deployed / "repository"),
        None,
        False,
    )
    test = made.acceptance
    assert test and (test.prompts, test.identical, test.refused) == (8, 8, 11)
    assert test.requests > 8 and 0 < test.first_token_ms < 2000
    assert made.address == f"{s3}/releases/gpt/{made.release}/"
    listed = list_uris(f"{s3}/releases/gpt/")
    first_pointer = releases.pointer()

    again = publish_release(recipe, deployed)
    assert again.release == made.release
    assert list_uris(f"{s3}/releases/gpt/") == listed
    assert releases.pointer() == first_pointer

    with raises(Code.CHANGED, "replace nothing", made.release, kind=LiveReleaseChanged):
        publish_release(recipe, other_deployed)
    assert list_uris(f"{s3}/releases/gpt/") == listed
    other = publish_release(recipe, other_deployed, replaces=made.release)
    assert (live(releases), other.before) == (other.release, made.release)
    assert [p.release for p in releases.pointer().previous] == [made.release]
    assert releases.published() == [other.release, made.release]

    assert roll_back(recipe).release == live(releases) == made.release
    assert roll_back(recipe, to=other.release[:20]).release == live(releases) == other.release
    with raises(Code.NOT_FOUND, "sha256-0123"):
        roll_back(recipe, to="sha256-0123")
    with raises(Code.AMBIGUOUS, "2 releases"):
        roll_back(recipe, to="")
    assert live(releases) == other.release


@pytest.mark.slow
def test_one_export_has_one_name(deployed: Path, tmp_path: Path) -> None:
    """The name does not depend on redeploying or on files that Triton's Python leaves behind."""
    made = deployed.parent
    again = deploy(RECIPE, made / "onnx", made / "model", tmp_path / "again", made / "data")
    assert release_name(again.repository) == release_name(deployed / "repository")


def test_the_name_is_what_the_shell_says(deployed: Path) -> None:
    unsigned = "! -name provenance.intoto.jsonl ! -name model.sig"
    command = f"find * -type f {unsigned} | LC_ALL=C sort | xargs sha256sum | sha256sum"
    said = subprocess.check_output(command, shell=True, cwd=deployed / "repository", text=True)
    assert release_name(deployed / "repository") == f"sha256-{said.split()[0]}"


@pytest.mark.slow
def test_bytes_that_have_changed_in_the_store_are_refused(
    recipe: Recipe, releases: Releases, deployed: Path, other_deployed: Path
) -> None:
    before = publish_release(recipe, other_deployed).release
    address = releases.address(publish_release(recipe, deployed, replaces=before).release)
    roll_back(recipe)
    config = read_text(f"{address}gpt/config.pbtxt")
    tampered = config.replace("max_tokens", "max_jokens")
    write_text(f"{address}gpt/config.pbtxt", tampered)
    with raises(Code.CORRUPT, "config.pbtxt"):
        publish_release(recipe, deployed, replaces=before)

    manifest = json.loads(
        read_text(f"{address}.lathe.json")
    )  # an attacker who also changes the manifest
    manifest["files"]["gpt/config.pbtxt"]["sha256"] = digest(tampered)
    write_text(f"{address}.lathe.json", json.dumps(manifest))
    with raises(Code.CORRUPT, address, kind=StageError):
        publish_release(recipe, deployed, replaces=before)
    assert live(releases) == before


@pytest.mark.slow
def test_a_model_that_says_something_else_is_refused(
    recipe: Recipe, releases: Releases, deployed: Path, other_deployed: Path, tmp_path: Path
) -> None:
    shutil.copytree(other_deployed / "repository", tmp_path / "repository")
    shutil.copyfile(deployed / "deploy.json", tmp_path / "deploy.json")
    with raises(Code.NOT_PROVED, kind=StageError):
        publish_release(recipe, tmp_path)
    assert live(releases) is None


@pytest.mark.slow
def test_a_server_that_is_too_slow_is_refused(s3: str, deployed: Path) -> None:
    recipe = make_recipe(s3, p99_first_token_ms=0.01)
    with raises(Code.GATE, "limit of 0.01 ms", kind=StageError):
        publish_release(recipe, deployed)
    assert live(open_releases(recipe)) is None


def test_mistakes_that_the_user_can_fix(recipe: Recipe, deployed: Path, tmp_path: Path) -> None:
    with raises(Code.MISSING_OPTION, "Production.releases"):
        publish_release(RECIPE, deployed)
    with raises(Code.NOT_FOUND, open_releases(recipe).root):
        roll_back(recipe)
    with raises(Code.WRONG_KIND, tmp_path, "deploy.json"):
        publish_release(recipe, tmp_path)
    write_text(f"{open_releases(recipe).root}/production.json", '{"live": 3}')
    with raises(Code.MALFORMED, "production.json"):
        roll_back(recipe)


KILLED_AFTER_UPLOAD = """
import os, pathlib, signal, sys
from lathe.release import publish as production
from lathe.release.deploy import deploy
from lathe_base.config.settings import Recipe
production.accept = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
production.publish_release(
    Recipe.model_validate_json(sys.argv[1]), pathlib.Path(sys.argv[2])
)
"""


@pytest.mark.slow
def test_killed_after_the_upload_and_run_again(
    recipe: Recipe, releases: Releases, deployed: Path
) -> None:
    command = [*warm.python(), "-c", KILLED_AFTER_UPLOAD, recipe.model_dump_json(), str(deployed)]
    killed = subprocess.run(command, env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    release = release_name(deployed / "repository")
    assert releases.published() == [release] and live(releases) is None
    assert publish_release(recipe, deployed).release == live(releases) == release


def test_new_attestations_replace_those_of_a_release_that_was_never_live(
    store: str, tmp_path: Path
) -> None:
    """Such as the verdict without which the server's pods have refused it."""
    releases = Releases(f"{store}/releases/gpt")
    golden = Golden(published=datetime.now(UTC), max_tokens=1, prompts=(), figures={})
    (tmp_path / "config.pbtxt").write_text("name")
    attestations = tmp_path / "provenance.intoto.jsonl"
    for text in ("without a verdict", "with a verdict"):
        attestations.write_text(text)
        release = releases.publish(tmp_path, golden)
        assert read_text(f"{releases.address(release)}{attestations.name}") == text
    releases.point(Pointer().moved_to(release, datetime.now(UTC)), seen=Pointer())
    attestations.write_text("another verdict")
    assert releases.publish(tmp_path, golden) == release
    assert read_text(f"{releases.address(release)}{attestations.name}") == "with a verdict"


def test_one_of_two_concurrent_pointer_moves_fails(store: str) -> None:
    releases, now = Releases(f"{store}/releases/gpt"), datetime.now(UTC)
    one = Pointer().moved_to("sha256-1", now)
    releases.point(one, seen=Pointer())
    with raises(Code.CHANGED, "production.json"):
        releases.point(Pointer().moved_to("sha256-2", now), seen=Pointer())
    releases.point(one.moved_to("sha256-2", now), seen=one)
    assert releases.pointer().previous == (one.live,)


def test_a_rollback_returns_to_the_release_before(store: str, tmp_path: Path) -> None:
    recipe, now = make_recipe(store), datetime.now(UTC)
    releases, names = open_releases(recipe), list[str]()
    for text in ("first", "second", "third"):
        (tmp_path / "config.pbtxt").write_text(text)
        golden = Golden(published=now, max_tokens=1, prompts=(), figures={})
        names.append(releases.publish(tmp_path, golden))
        seen = releases.pointer()
        releases.point(seen.moved_to(names[-1], now), seen)
    assert roll_back(recipe).release == live(releases) == names[1]
    assert roll_back(recipe).release == live(releases) == names[2]


def test_the_commands(
    recipe: Recipe, releases: Releases, deployed: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = ("-o", f"Production.releases={s3}/releases")
    burst = ("-o", "Production.burst_seconds=0.5", "-o", "Production.burst_clients=4")
    done = CliRunner().invoke(app, ["release", "publish", str(deployed), *option, *burst])
    assert done.exit_code == 0, done.output
    release = live(releases)
    assert release is not None
    address = releases.address(release)
    assert f"live: {address}" in done.output
    pointer = Pointer().moved_to("sha256-" + "0" * 64, datetime.now(UTC))
    releases.point(pointer, seen=releases.pointer())  # another process
    refused = CliRunner().invoke(app, ["release", "publish", str(deployed), *option, *burst])
    assert isinstance(refused.exception, LiveReleaseChanged)
    assert "with --replaces sha256-000000000000" in refused.exception.hint
    releases.point(pointer.moved_to(release, datetime.now(UTC)), seen=pointer)
    listed = CliRunner().invoke(app, ["release", "list", *option])
    assert listed.exit_code == 0, listed.output
    assert release[:19] in listed.output and "now, since" in listed.output

    monkeypatch.setattr(production, "accept", None)  # a rollback does not test the release
    back = CliRunner().invoke(app, ["release", "rollback", "--to", release, *option])
    assert back.exit_code == 0, back.output
    assert f"live: {address}" in back.output and "no Deployment" in back.output
