"""`make push` to a real registry on the loopback interface, and pulling by digest."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.build import REFERENCES, ROOT
from lathe_base.ports import free_port
from tests.support.podman import podman

pytestmark = pytest.mark.containers

SETTINGS = """
version: 0.1
storage: {filesystem: {rootdir: ROOT}}
http: {addr: "ADDRESS"}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed")
    address = f"127.0.0.1:{free_port()}"
    settings = tmp_path / "registry.yaml"
    settings.write_text(
        SETTINGS.replace("ROOT", str(tmp_path / "store")).replace("ADDRESS", address)
    )
    with (tmp_path / "registry.log").open("w") as log:
        server = subprocess.Popen(["docker-registry", "serve", settings], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://{address}/v2/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def test_push_and_pull_by_digest(images: dict[str, str], registry: str) -> None:
    if REFERENCES.exists():
        pytest.skip(f"{REFERENCES} exists from an earlier push")
    push = ["make", "push", f"REGISTRY={registry}/team", "IMAGES=serve"]
    try:
        done = subprocess.run(
            [*push, "PUSH_OPTIONS=--tls-verify=false"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        written = json.loads(REFERENCES.read_text())
    finally:
        REFERENCES.unlink(missing_ok=True)
    (reference,) = written.values()
    assert reference == done.stdout.splitlines()[-1]
    assert reference.startswith(f"{registry}/team/lathe-serve@sha256:")
    podman("pull", "--tls-verify=false", reference)
    pulled = podman("image", "inspect", "--format", "{{.Id}}", reference)
    assert pulled == podman("image", "inspect", "--format", "{{.Id}}", images["serve"])
    tagged = list(podman("images", "--format", "{{.Repository}}:{{.Tag}}").split())
    for name in tagged:
        if name.startswith(registry):
            podman("untag", reference, name, check=False)
