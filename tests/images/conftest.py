"""The CPU flavours of all images, built once by `make images`."""

import os
import subprocess
from pathlib import Path

import pytest

import lathe
from tests.pipelines.conftest import corpus  # noqa: F401
from tests.serve.conftest import checkpoint, exported, repository, serving  # noqa: F401
from tests.support import podman

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("serve", "train", "paddle")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> reference."""
    if reason := podman.absent():
        pytest.skip(f"images cannot be built here: {reason}")
    settings = tmp_path_factory.mktemp("podman") / "containers.conf"
    settings.write_text(podman.SETTINGS)
    os.environ.setdefault("CONTAINERS_CONF", str(settings))
    base = podman.make_base(tmp_path_factory.mktemp("base"))
    options = " ".join(podman.pip_options(tmp_path_factory.mktemp("pip")))
    done = subprocess.run(
        ["make", "--no-print-directory", "images", f"BASE={base}", f"BUILD_OPTIONS={options}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    printed = dict(line.split() for line in done.stdout.splitlines()[-len(NAMES) :])
    assert all(identity.startswith("sha256:") for identity in printed.values())
    found = {name: f"localhost/lathe-{name}:{lathe.__version__}" for name in NAMES}
    for reference, (name, moving) in zip(printed, found.items(), strict=True):
        assert reference.startswith(f"localhost/lathe-{name}:")
        assert podman.podman("image", "inspect", "--format", "{{.Id}}", moving).strip() == (
            printed[reference].removeprefix("sha256:")
        )
    return found


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder that uid 10001 may write to."""
    tmp_path.chmod(0o777)
    return tmp_path
