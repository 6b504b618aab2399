"""Rendered manifests match the golden files."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from components.images import TRAIN
from images.build import IMAGES
from tests.support.rendered import MANIFESTS, OVERLAYS, ROOT, Object, pods, text, variant

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_drift(overlay: str) -> None:
    golden = GOLDEN / f"{overlay}.yaml"
    assert text(MANIFESTS / "overlays" / overlay) == golden.read_text(), (
        f"overlay {overlay} differs from {golden}: "
        "if that is intended, run `make golden` and review the diff"
    )


def test_every_file_is_used() -> None:
    """Files that no kustomization names would never be applied."""
    apart = {
        "secrets.example.yaml",
        "components/autoscaling/adapter.yaml",
        "overlays/standalone/kfp-launcher.yaml",
    }
    used: set[Path] = set()
    for path in MANIFESTS.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        names = [*content.get("resources", []), *content.get("components", [])]
        names += [patch["path"] for patch in content.get("patches", []) if "path" in patch]
        used |= {path, *((path.parent / name).resolve() for name in names)}
    files = set(MANIFESTS.rglob("*.yaml")) - {MANIFESTS / name for name in apart}
    assert files - used == set()


def test_secrets_are_described_and_never_included(objects: list[Object]) -> None:
    assert [o for o in objects if o["kind"] == "Secret"] == []
    shapes = {
        o["metadata"]["name"]: set(o["stringData"])
        for o in yaml.safe_load_all((MANIFESTS / "secrets.example.yaml").read_text())
    }
    for pod in pods(objects):
        for container in pod.containers:
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                assert not reference or reference["key"] in shapes[reference["name"]]
        for volume in pod.spec["volumes"]:
            assert "secret" not in volume or volume["secret"]["secretName"] in shapes


def test_placeholders_only() -> None:
    for secret in yaml.safe_load_all((MANIFESTS / "secrets.example.yaml").read_text()):
        assert "data" not in secret and set(secret["stringData"].values()) == {"REPLACE"}


def test_kind_runs_the_images_that_are_built_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    images = {c["image"] for p in pods(variant("kind", tmp_path_factory)) for c in p.containers}
    assert images == {TRAIN.replace("train", name) for name in IMAGES}


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize(
    "target, folder", [("golden", "tests/manifests/golden"), ("manifests", "build/manifests")]
)
def test_make_renders_every_overlay(target: str, folder: str) -> None:
    command = ["make", "--dry-run", target]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for overlay in OVERLAYS:
        line = f"kubectl kustomize manifests/overlays/{overlay} -o {folder}/{overlay}.yaml"
        assert line in made.stdout
