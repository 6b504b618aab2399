"""Contents of the images."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.images.conftest import NAMES
from tests.support.podman import BASE, podman, run

pytestmark = pytest.mark.containers

LIMITS = {"serve": 1e9, "train": 3.5e9, "paddle": 5e9, "janitor": 0.5e9}
"""Maximum sizes in bytes."""


@pytest.mark.parametrize("name", NAMES)
def test_labels_user_and_size(images: dict[str, str], name: str) -> None:
    about = inspect(images[name])
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in about["Labels"].items()}
    assert labels["title"] == f"lathe-{name}" and labels["lathe.flavour"] == "cpu"
    assert any(labels["revision"][:12] in tag for tag in about["RepoTags"])
    assert {"version", "created", "source"} <= labels.keys()
    assert about["User"] == "10001:10001"
    print(f"{name}: {about['Size'] / 1e6:.0f} MB in {len(about['RootFS']['Layers'])} layers")
    assert about["Size"] < LIMITS[name]


@pytest.mark.parametrize("name", NAMES)
def test_no_cache_no_settings_no_tests_in_a_layer(
    images: dict[str, str], name: str, tmp_path: Path
) -> None:
    podman("save", "--format", "docker-archive", "--output", tmp_path / "image.tar", images[name])
    ours = 0
    with tarfile.open(tmp_path / "image.tar") as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]  # type: ignore[arg-type]
        of_the_base = len(inspect(BASE)["RootFS"]["Layers"])
        for layer in manifest["Layers"][of_the_base:]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                for path in files.getnames():
                    ours += 1
                    assert not path.startswith(("mnt/", "build", "opt/lathe/source/tests")), path
                    assert not path.startswith(("root/.", "home/lathe/.cache", "tmp/")), path
                    assert not path.endswith(("pip.conf", "refs.json", ".git", ".env")), path
    assert ours > 1000
    about = inspect(images[name])
    assert "pip.conf" not in json.dumps(about["Config"])


@pytest.mark.parametrize("name", NAMES)
def test_installed_files_belong_to_root(images: dict[str, str], name: str) -> None:
    code = "import os; print(*(f for f, _, _ in os.walk('/opt') if os.access(f, os.W_OK)))"
    assert run(images[name], "-c", code, options=["--entrypoint=python3"]).split() == []


def inspect(image: str) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(podman("image", "inspect", image))[0]
    return about
