"""The smallest pipeline, every step a container: KFP's DockerRunner on podman's socket."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.conftest import RECIPE

pytestmark = [pytest.mark.containers, pytest.mark.slow]

SCRIPT = """
import json, sys
from kfp import local
from pipelines.compile import PIPELINES
root, arguments = sys.argv[1], json.loads(sys.argv[2])
runner = local.DockerRunner(
    user="10001:10001", read_only=True, cap_drop=["ALL"], tmpfs={"/tmp": ""}, network_mode="none"
)
local.init(runner=runner, pipeline_root=root)
PIPELINES["pretrain"](**arguments)
"""


@pytest.fixture
def socket(images: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Where podman answers as Docker does."""
    path = tmp_path / "podman.sock"
    service = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{path}"])
    try:
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield f"unix://{path}"
    finally:
        service.terminate()
        service.wait()


def test_pretrain(images: dict[str, str], socket: str, work: Path, corpus: Path) -> None:
    root = work / "root"
    root.mkdir()
    root.chmod(0o777)
    (root / "micro.yaml").write_text(RECIPE)
    (root / "corpus.txt").write_text("\n\n".join(f.read_text() for f in corpus.iterdir()))
    arguments = {"recipe": f"{root}/micro.yaml", "corpus": f"{root}/corpus.txt", "overrides": []}
    environment = os.environ | {"DOCKER_HOST": socket, "LATHE_TRAIN_IMAGE": images["train"]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), json.dumps(arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"Found image '{images['train']}'" in done.stdout
    (model,) = root.glob("*/pretrain/model")
    assert (model / "model.safetensors").stat().st_uid == 10001
    (metrics,) = root.glob("*/evaluate*/metrics")
    assert json.loads(metrics.read_text())["perplexity"] > 1
