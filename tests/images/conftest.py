"""Fixtures that build the images once with `make images`."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import lathe
from tests.support import podman
from tests.support.micro_run import write_corpus

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("serve", "train", "paddle", "janitor")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """References of the CPU images by name."""
    return build(tmp_path_factory, "cpu", NAMES)


def build(factory: pytest.TempPathFactory, flavour: str, names: Sequence[str]) -> dict[str, str]:
    """Build images with `make images` as a user would; returns references by name."""
    if reason := podman.unavailable():
        pytest.skip(f"cannot build images: {reason}")
    settings = factory.mktemp("podman") / "containers.conf"
    settings.write_text(podman.SETTINGS)
    os.environ.setdefault("CONTAINERS_CONF", str(settings))
    base = podman.make_base(factory.mktemp("base"))
    options = " ".join(podman.pip_options(factory.mktemp("pip")))
    given = [f"FLAVOUR={flavour}", f"IMAGES={' '.join(names)}", f"BASE={base}"]
    done = subprocess.run(
        ["make", "--no-print-directory", "images", *given, f"BUILD_OPTIONS={options}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    printed = dict(line.split() for line in done.stdout.splitlines()[-len(names) :])
    assert all(identity.startswith("sha256:") for identity in printed.values())
    moving = {name: f"localhost/lathe-{name}:{lathe.__version__}" for name in names}
    for reference, (name, other) in zip(printed, moving.items(), strict=True):
        assert reference.startswith(f"localhost/lathe-{name}:")
        assert podman.podman("image", "inspect", "--format", "{{.Id}}", other).strip() == (
            printed[reference].removeprefix("sha256:")
        )
    return dict(zip(names, printed, strict=True))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder that the containers' user (uid 10001) can write to."""
    tmp_path.chmod(0o777)
    return tmp_path
