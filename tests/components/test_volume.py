"""Steps whose models and data sets are on a volume, below LATHE_STORE=file:///..., and not where
Pipelines puts artifacts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from components import training
from components.artifacts import STORE, address_of
from lathe.config.recipe import load_recipe
from lathe.launch.cluster import trainjob
from tests.support.micro_run import write_corpus, write_recipe

RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"
ROOT = f"minio://mlpipeline/artifacts/pretrain/{RUN}"
# Both steps as Pipelines' executor calls them; its launcher makes the folders of outputs, below
# /minio in a pod.
STEPS = """
import importlib, json, sys
from pathlib import Path
from kfp import dsl
from kfp.dsl.types import artifact_types
name, mount, root, given = sys.argv[1:]
artifact_types._MINIO_LOCAL_MOUNT_PREFIX = mount
given = json.loads(given)
kinds = {"data": dsl.Dataset, "model": dsl.Model, "page": dsl.HTML, "metrics": dsl.Metrics}
component = getattr(importlib.import_module(f"components.{name}.component"), name)
made = {
    output: kinds[output](name=output, uri=f"{root}/{name}/7041/{output}")
    for output in component.component_spec.outputs
}
for artifact in made.values():
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
read = {key: kinds[key](name=key, uri=given.pop(key)) for key in kinds if key in given}
component.python_func(**given, **read, **made)
print("URIS: " + json.dumps({key: artifact.uri for key, artifact in made.items()}))
"""


def step(name: str, folder: Path, **given: Any) -> dict[str, str]:
    """Run a component; returns the addresses that it leaves to Pipelines to record."""
    environment = os.environ | {
        "KFP_RUN_ID": RUN,
        "PYTHONPATH": str(Path.cwd()),
        STORE: f"file://{folder}/pvc",
    }
    command = [sys.executable, "-c", STEPS, name, f"{folder}/minio/", ROOT, json.dumps(given)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("URIS: "))
    uris: dict[str, str] = json.loads(line.removeprefix("URIS: "))
    return uris


def test_two_steps_without_an_object_store(tmp_path: Path) -> None:
    given: dict[str, Any] = {"recipe": str(write_recipe(tmp_path)), "overrides": []}
    mine = tmp_path / "pvc" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("stays")
    prepared = step("prepare", tmp_path, **given, corpus=str(write_corpus(tmp_path)))
    store = f"file://{tmp_path}/pvc/pretrain/{RUN}"
    assert prepared["data"] == f"{store}/prepare/7041/data"
    assert prepared["metrics"] == f"{ROOT}/prepare/7041/metrics"  # where the UI finds it
    trained = step("pretrain", tmp_path, **given, data=prepared["data"])
    assert trained["model"] == f"{store}/pretrain/7041/model"
    assert trained["page"] == f"{ROOT}/pretrain/7041/page"
    model = Path(trained["model"].removeprefix("file://"))
    assert {"config.json", "model.safetensors", "lathe.json"} <= {p.name for p in model.iterdir()}
    assert not model.with_name("model.state").exists()  # saved states, which are over
    left = tmp_path / "minio" / "mlpipeline" / "artifacts" / "pretrain" / RUN / "pretrain" / "7041"
    assert sorted(path.name for path in left.iterdir() if not path.name.startswith(".")) == [
        *("metrics", "model.mirror", "page"),
    ]
    assert mine.read_text() == "stays"


def test_a_trainjob_writes_to_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv(STORE, f"file://{tmp_path}/pvc/")
    ran: list[list[str]] = []

    def run(command: list[str], *_: object) -> None:
        ran.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainjob, "run", run)
    data = dsl.Dataset(name="data", uri=f"file://{tmp_path}/pvc/pretrain/{RUN}/prepare/7/data")
    output = dsl.Model(name="model", uri=f"{ROOT}/pretrain/8/model")
    command = ["pretrain", "--data", data, "--output", output]
    recipe = load_recipe("tiny", ["Launch.nodes=2", "Distributed.dp_degree=2"])
    with pytest.raises(KeyboardInterrupt):
        training.train(recipe, command, output, dsl.HTML(), lambda: None)
    store = f"file://{tmp_path}/pvc/pretrain/{RUN}"
    assert ran == [
        ["pretrain", "--data", f"{store}/prepare/7/data", "--output", f"{store}/pretrain/8/model"]
    ]
    assert address_of(output) == output.uri  # not moved a second time


def test_without_the_variable_artifacts_stay_where_pipelines_puts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    monkeypatch.delenv(STORE, raising=False)
    uri = f"{ROOT}/pretrain/8/model"
    assert address_of(dsl.Model(name="model", uri=uri)) == uri
