"""Sources of the keys for signing and verification."""

from pathlib import Path

import pytest

from lathe_base.config.recipe import load_recipe
from lathe_base.provenance import bundle, keys
from lathe_base.provenance.keys import SIGNING_KEY, TRUSTED, generate, signing_key, trusted_keys
from lathe_base.provenance.step import attest
from lathe_base.provenance.surroundings import IMAGE, PIPELINE


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders where a pod mounts its keys."""
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.setattr(keys, "MOUNTED", tmp_path / "signing")
    monkeypatch.setattr(keys, "TRUSTED_MOUNTED", tmp_path / "trusted")
    return tmp_path


def test_a_pod_signs_with_the_key_in_its_secret(
    mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signing_key() is None and keys.password() is None
    generate(mounted / "signing" / "key.pem")
    (mounted / "signing" / "password").write_text("open sesame\n")
    assert signing_key() == mounted / "signing" / "key.pem"
    assert keys.password() == "open sesame"
    monkeypatch.setenv(SIGNING_KEY, str(mounted / "mine.pem"))
    assert signing_key() == mounted / "mine.pem" and keys.password() is None


def test_whom_to_trust(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trusted_keys() == []
    generate(mounted / "trusted" / "signing.pem")
    assert trusted_keys() == [mounted / "trusted" / "signing.pub"]
    generate(mounted / "others" / "a.pem")
    monkeypatch.setenv(TRUSTED, str(mounted / "others"))
    assert trusted_keys() == [mounted / "others" / "a.pub"]
    assert trusted_keys(["named.pub"]) == [Path("named.pub")]


@pytest.mark.parametrize("in_pod", [True, False])
def test_a_step_names_its_pipeline_and_in_a_pod_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_pod: bool
) -> None:
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(IMAGE, f"registry/lathe-train@sha256:{'a' * 64}")
    monkeypatch.setenv(PIPELINE, f"qat@sha256:{'b' * 64}")
    monkeypatch.setenv("KFP_RUN_ID", "run-1")
    products = {"model.onnx": "c" * 64}
    attest("export", load_recipe("tiny"), tmp_path, [], {}, "2026-01-01T00:00:00Z", products)
    (attestation,) = bundle.read(tmp_path)
    found = attestation.statement.predicate.build_definition.resolved_dependencies
    named = {r.kind: (r.name, r.sha256) for r in found if r.kind in ("image", "pipeline")}
    image = {"image": ("registry/lathe-train", "a" * 64)} if in_pod else {}
    assert named == {"pipeline": ("qat", "b" * 64), **image}
    assert attestation.statement.materials == []
    assert attestation.statement.predicate.run_details.metadata.invocation_id == "run-1"
