"""A release that does not satisfy `Production.require` never reaches a ready server."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe.evaluate.gate import gate
from lathe.release.deploy import deploy
from lathe.release.publish import publish_release, roll_back
from lathe.release.release import open_releases
from lathe_base.artifacts.kinds import release_name
from lathe_base.config.settings import ProductionSettings, Recipe, ServingSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.__main__ import REQUIRE, TRUSTED, admit
from lathe_base.provenance.chain import REQUIREMENTS, require
from lathe_base.provenance.keys import SIGNING_KEY, generate
from lathe_base.provenance.signature import Signer, sign
from lathe_base.storage import sha256, upload
from lathe_base.storage.ownership import ATTESTATIONS, SIGNATURE
from lathe_serving.environment import find_environment
from lathe_serving.server import ANY_PORTS
from tests.support.attested import AttestedRun
from tests.support.errors import raises

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture(scope="module")
def made_release(
    made_once: AttestedRun, tmp_path_factory: pytest.TempPathFactory, triton: None
) -> Iterator[tuple[AttestedRun, Recipe, Path]]:
    """A deployment, its production recipe, and the folder of its published release."""
    folder = tmp_path_factory.mktemp("release")
    made = AttestedRun(folder / "made")
    shutil.copytree(made_once.folder, made.folder)
    production = ProductionSettings(
        releases=f"file://{folder}/releases",
        burst_seconds=0.3,
        burst_clients=2,
        require=list(REQUIREMENTS),
        keys=[str(made.public)],
    )
    serving = ServingSettings(**ANY_PORTS, threads=1)
    recipe = made.recipe.model_copy(update={"Production": production, "Serving": serving})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
        patch.delenv("KUBECONFIG", raising=False)
        deploy(recipe, made.onnx, made.other, made.deployed, made.data)
        shown = (made.folder / "other-eval", made.folder / "verdict.json", made.other)
        live = publish_release(recipe, made.deployed, *shown)
    yield made, recipe, folder / "releases" / "gpt" / live.release


@pytest.fixture
def release(made_release: tuple[AttestedRun, Recipe, Path], tmp_path: Path) -> Path:
    """A copy of the release that the test may modify; its name is its digest."""
    published = made_release[2]
    return Path(shutil.copytree(published, tmp_path / "store" / published.name))


@pytest.fixture
def keys(made_release: tuple[AttestedRun, Recipe, Path]) -> list[Path]:
    return [made_release[0].public]


@pytest.fixture
def pod(keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the pod's first container."""
    monkeypatch.setenv(REQUIRE, ",".join(REQUIREMENTS))
    monkeypatch.setenv(TRUSTED, str(keys[0].parent))


def put(release: Path, tmp_path: Path) -> str:
    """Publish a tampered release with a manifest that agrees with it."""
    (release / ".lathe.json").unlink(missing_ok=True)
    elsewhere = tmp_path / "elsewhere" / release.name
    shutil.rmtree(elsewhere, ignore_errors=True)
    uri = f"file://{elsewhere}/"
    upload(release, uri)
    return uri


def test_a_release_that_shows_everything_is_served(
    release: Path, keys: list[Path], pod: None, tmp_path: Path
) -> None:
    require(release, REQUIREMENTS, keys)
    uri = put(release, tmp_path)
    assert release_name(admit(uri, tmp_path / "models" / "release")) == release.name
    admit(uri, tmp_path / "models" / "release")  # again, after a restart of the container


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_is_refused(
    release: Path, keys: list[Path], tmp_path: Path, pod: None
) -> None:
    files = [p for p in release.rglob("*") if p.is_file() and p.name != ".lathe.json"]
    assert {"README.md", "bom.cdx.json", "quality.svg", "sbom.cdx.json"} <= {p.name for p in files}
    assert len(files) == 14
    for path in files:
        original = path.read_bytes()
        for at in sorted({0, len(original) // 3, len(original) // 2, len(original) - 2}):
            changed = bytearray(original)
            changed[at] ^= 1
            path.write_bytes(changed)
            with pytest.raises((StageError, UserError)):
                require(release, REQUIREMENTS, keys)
            with pytest.raises((StageError, UserError)):
                admit(put(release, tmp_path), tmp_path / "models" / "release")
            assert not (tmp_path / "models" / "release").exists()
            shutil.rmtree(tmp_path / "models", ignore_errors=True)
        path.write_bytes(original)
    require(release, REQUIREMENTS, keys)
    (release / "gpt" / "config.pbtxt").write_text("other")
    with raises(Code.CORRUPT, release.name, kind=StageError):
        admit(put(release, tmp_path), tmp_path / "models" / "release")
    assert not (tmp_path / "models" / "release").exists()


def test_a_file_that_was_added_is_refused(release: Path, keys: list[Path]) -> None:
    (release / "gpt" / "1" / "sitecustomize.py").write_text("print('hello')")
    with raises(Code.CORRUPT, "(signature)", "sitecustomize.py", kind=StageError):
        require(release, REQUIREMENTS, keys)


def test_stripped_of_its_attestations(release: Path, keys: list[Path]) -> None:
    (release / ATTESTATIONS).unlink()
    with raises(Code.CORRUPT, "(signature)", "provenance.intoto.jsonl", kind=StageError):
        require(release, REQUIREMENTS, keys)
    with raises(Code.UNTRUSTED, "(chain)", ATTESTATIONS, kind=StageError):
        require(release, ["gate"], keys)
    (release / SIGNATURE).unlink()
    with raises(Code.UNTRUSTED, "not signed", kind=StageError):
        require(release, ["signature"], keys)


def test_signed_by_another_key(release: Path, keys: list[Path], tmp_path: Path) -> None:
    generate(tmp_path / "mallory.pem")
    sign(release, Signer(tmp_path / "mallory.pem"))
    with raises(Code.UNTRUSTED, "(signature)", kind=StageError):
        require(release, REQUIREMENTS, keys)
    with raises(Code.UNTRUSTED, "(chain)", kind=StageError):  # but the history is not signed by her
        require(release, REQUIREMENTS, [tmp_path / "mallory.pub"])


def test_a_valid_file_of_another_release(
    release: Path, made_release: tuple[AttestedRun, Recipe, Path], keys: list[Path]
) -> None:
    """Replaces files of the release with those of another export that is validly signed."""
    made, _, _ = made_release
    for name in ("model.onnx", "config.json", "export.json"):
        shutil.copyfile(made.dense_onnx / name, release / "gpt" / "1" / name)
    with raises(Code.CORRUPT, "(signature)", kind=StageError):
        require(release, REQUIREMENTS, keys)
    for name in (ATTESTATIONS, SIGNATURE):
        shutil.copyfile(made.dense_onnx / name, release / name)
    with raises(Code.CORRUPT, "(signature)", kind=StageError):
        require(release, REQUIREMENTS, keys)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_perplexity_increase": 0.0, "on_inconclusive": "stop"}, "did not pass this model"),
        (None, "do not include a verdict of"),
    ],
)
def test_models_that_fail_the_gate_are_not_published(
    made_release: tuple[AttestedRun, Recipe, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object] | None,
    reason: str,
) -> None:
    made, recipe, _ = made_release
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    verdict = None
    if settings is not None:
        verdict = tmp_path / "verdict.json"
        strict = recipe.model_copy(update={"Gate": recipe.Gate.model_copy(update=settings)})
        evaluations = (made.folder / f"{name}-eval" for name in ("dense", "other"))
        assert not gate(strict, *evaluations, verdict).passed
    with raises(Code.GATE, "Production.require (gate)", reason, kind=StageError):
        publish_release(recipe, made.deployed, None, verdict)


def test_the_verdict_on_another_model_does_not_count(
    made_release: tuple[AttestedRun, Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, recipe, _ = made_release
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    dense = made.folder / "dense-eval"
    assert gate(recipe, dense, dense, tmp_path / "verdict.json").passed
    with raises(Code.GATE, "another model", kind=StageError):
        publish_release(recipe, made.deployed, None, tmp_path / "verdict.json")


@pytest.mark.parametrize("how", ["as it is", "and listed", "and its list removed"])
@pytest.mark.parametrize("wanted", [["signature"], ["chain"], list(REQUIREMENTS)])
def test_a_model_changed_after_its_rehearsal_is_not_signed_as_a_release(
    made_release: tuple[AttestedRun, Recipe, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: list[str],
    how: str,
) -> None:
    made, recipe, published = made_release
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    deployed = Path(shutil.copytree(made.deployed, tmp_path / "deployed"))
    repository = deployed / "repository"
    changed, listing = repository / "gpt" / "config.pbtxt", repository / ".lathe.json"
    changed.write_text(changed.read_text() + "# another one\n")
    if how == "and listed":
        values = json.loads(listing.read_text())
        entry = {"bytes": changed.stat().st_size, "sha256": sha256(changed)}
        values["files"]["gpt/config.pbtxt"] = entry
        listing.write_text(json.dumps(values))
    if how == "and its list removed":
        listing.unlink()
    production = recipe.Production.model_copy(update={"require": wanted})
    own = recipe.model_copy(update={"Production": production})
    before = sorted(published.parent.iterdir())
    with pytest.raises((StageError, UserError)) as refused:
        publish_release(own, deployed, None, made.folder / "verdict.json")
    assert refused.value.code in (Code.CORRUPT, Code.UNTRUSTED)
    assert sorted(published.parent.iterdir()) == before


def test_rollback_to_a_never_live_release_is_rejected(
    made_release: tuple[AttestedRun, Recipe, Path], tmp_path: Path
) -> None:
    _, recipe, published = made_release
    releases = open_releases(recipe)
    other = tmp_path / "other"
    shutil.copytree(published, other)
    (other / "gpt" / "config.pbtxt").write_text("# never tested\n")
    (other / ".lathe.json").unlink(missing_ok=True)
    name = releases.publish(other, releases.golden(published.name))
    with raises(Code.NOT_PROVED, name):
        roll_back(recipe, name)
    assert roll_back(recipe, published.name).release == published.name


def test_the_tampered_live_release_is_not_rolled_back_to(
    made_release: tuple[AttestedRun, Recipe, Path], tmp_path: Path
) -> None:
    _, recipe, published = made_release
    root = tmp_path / "releases"
    shutil.copytree(published.parents[1], root)
    production = recipe.Production.model_copy(update={"releases": f"file://{root}"})
    own = recipe.model_copy(update={"Production": production})
    signature = root / "gpt" / published.name / SIGNATURE
    signature.write_text(json.dumps({**json.loads(signature.read_text()), "mediaType": "x"}))
    with pytest.raises((StageError, UserError)):
        roll_back(own, published.name)


def test_no_key_and_no_such_requirement(release: Path, keys: list[Path]) -> None:
    with raises(Code.MISSING_OPTION, "Production.require is signature"):
        require(release, ["signature"], [])
    with raises(Code.UNKNOWN_NAME, "Production.require: magic"):
        require(release, ["magic"], keys)
    require(release, [], [])
    with raises(Code.NOT_PROVED, "(proof:gguf)", kind=StageError):
        require(release, ["proof", "proof:gguf"], keys)


def test_the_pod_starts_it_with_what_the_server_has(
    release: Path, keys: list[Path], tmp_path: Path
) -> None:
    uri = put(release, tmp_path)
    root = Path(__file__).resolve().parents[2]
    variables = {"PYTHONPATH": str(root), "HOME": str(tmp_path), TRUSTED: str(keys[0].parent)}
    variables[REQUIRE] = "signature,chain,gate,proof"
    command = [find_environment().python, "-m", "lathe_base.provenance", "fetch", uri]
    command.append(str(tmp_path / "models" / "release"))
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (keys_elsewhere := tmp_path / "keys").mkdir()
    generate(keys_elsewhere / "mallory.pem")
    command[-1] += "-again"
    refused = subprocess.run(
        command, env=variables | {TRUSTED: str(keys_elsewhere)}, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "error[untrusted]: " in refused.stderr
    assert "Production.require (signature)" in refused.stderr
    assert not Path(command[-1]).exists()
