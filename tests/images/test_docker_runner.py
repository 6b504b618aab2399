"""Pipelines with every step in a container: KFP's DockerRunner on podman's socket."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lathe.data.prepare import prepare
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from tests.support.micro_run import RECIPE

pytestmark = pytest.mark.containers

SCRIPT = """
import json, sys
from kfp import local
from pipelines.compiler.compile import build
from pipelines.steps.resources import Variant
root, name, engine, arguments = *sys.argv[1:4], json.loads(sys.argv[4])
runner = local.DockerRunner(
    user="10001:10001", read_only=True, cap_drop=["ALL"], tmpfs={"/tmp": ""}, network_mode="none"
)
local.init(runner=runner, pipeline_root=root)
build(name, Variant(engine=engine))(**arguments)
"""


@pytest.fixture
def socket(images: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Run podman's Docker-compatible API; yields its address."""
    path = tmp_path / "podman.sock"
    service = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{path}"])
    try:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield f"unix://{path}"
    finally:
        service.terminate()
        service.wait()


@pytest.fixture
def root(work: Path, corpus: Path) -> Path:
    """Folder for artifacts, with a recipe and a corpus."""
    root = work / "root"
    root.mkdir()
    root.chmod(0o777)
    (root / "micro.yaml").write_text(RECIPE)
    (root / "corpus.txt").write_text("\n\n".join(f.read_text() for f in corpus.iterdir()))
    return root


def run_pipeline(
    images: dict[str, str], socket: str, root: Path, name: str, engine: str, **arguments: Any
) -> str:
    """Run a pipeline in a process; returns its standard output."""
    inputs = {"recipe": f"{root}/micro.yaml", "corpus": f"{root}/corpus.txt", **arguments}
    names = {f"LATHE_{image.upper()}_IMAGE": images[image] for image in ("train", "paddle")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), name, engine, json.dumps(inputs)],
        env=os.environ | {"DOCKER_HOST": socket, **names},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_pretrain(images: dict[str, str], socket: str, root: Path) -> None:
    said = run_pipeline(images, socket, root, "pretrain", "torch", overrides=[])
    assert f"Found image '{images['train']}'" in said
    assert f"Found image '{images['paddle']}'" not in said
    (model,) = root.glob("*/pretrain/model")
    assert (model / "model.safetensors").stat().st_uid == 10001
    (metrics,) = root.glob("*/evaluate*/metrics")
    assert json.loads(metrics.read_text())["perplexity"] > 1


def test_prune_with_paddle(images: dict[str, str], socket: str, root: Path) -> None:
    settings = load_recipe(f"{root}/micro.yaml", [])
    prepare(settings, root / "tokens", f"{root}/corpus.txt")
    pretrain(settings, root / "tokens", root / "dense")
    subprocess.run(["chmod", "--recursive", "a+rX", root / "dense"], check=True)
    arguments = {"model": f"{root}/dense", "overrides": ["Compress.engine=paddle"]}
    said = run_pipeline(images, socket, root, "prune", "paddle", **arguments)
    found = {line.split("'")[1] for line in said.splitlines() if "Found image '" in line}
    assert found == {images["train"], images["paddle"]}
    (metadata,) = root.glob("*/prune/pruned/lathe.json")
    assert json.loads(metadata.read_text())["engine"] == "paddle"
    assert metadata.stat().st_uid == 10001
    for variant in ("dense", "pruned"):
        (scores,) = root.glob(f"*/evaluate-{variant}/evaluation/metrics.json")
        assert json.loads(scores.read_text())["model"]["engine"] == "paddle"
        (exported,) = root.glob(f"*/export-{variant}/exported")
        assert (exported / "paddle" / "model.pdiparams").is_file()
        assert (exported / "model.onnx").is_file()
