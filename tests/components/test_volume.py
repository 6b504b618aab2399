"""Steps with models and data sets on a volume (LATHE_STORE=file:///...) instead of in Pipelines'
artifact store."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl
from kfp.dsl.types import artifact_types

from components import training
from components.artifacts import POINTER, STORE, local, output_address, resolve_pointer
from lathe_base.config.recipe import load_recipe
from lathe_launch.cluster import trainjob
from lathe_launch.usage import Usage
from tests.support import warm
from tests.support.micro_run import write_corpus, write_recipe

RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"
ROOT = f"minio://mlpipeline/artifacts/pretrain/{RUN}"
# Both steps as Pipelines' executor calls them; its launcher creates the folders of outputs, below
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
left = [sorted(path.name for path in Path(part.path).glob("*")) for part in made.values()]
print("LEFT: " + json.dumps(dict(zip(made, left))))
"""


def step(name: str, folder: Path, **given: Any) -> dict[str, list[str]]:
    """Run a component; returns the files that it leaves for Pipelines to upload, by output."""
    environment = os.environ | {
        "KFP_RUN_ID": RUN,
        "PYTHONPATH": str(Path.cwd()),
        STORE: f"file://{folder}/pvc",
    }
    command = [*warm.python(), "-c", STEPS, name, f"{folder}/minio/", ROOT, json.dumps(given)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LEFT: "))
    left: dict[str, list[str]] = json.loads(line.removeprefix("LEFT: "))
    return left


def test_two_steps_without_an_object_store(tmp_path: Path) -> None:
    given: dict[str, Any] = {"recipe": str(write_recipe(tmp_path)), "overrides": []}
    mine = tmp_path / "pvc" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("stays")
    prepared = step("prepare", tmp_path, **given, corpus=str(write_corpus(tmp_path)))
    store = f"file://{tmp_path}/pvc/pretrain/{RUN}"
    assert prepared["data"] == [POINTER]
    trained = step("pretrain", tmp_path, **given, data=f"{ROOT}/prepare/7041/data")
    assert trained["model"] == [POINTER]
    left = tmp_path / "minio" / "mlpipeline" / "artifacts" / "pretrain" / RUN / "pretrain" / "7041"
    address = (left / "model" / POINTER).read_text().strip()
    assert address == f"{store}/pretrain/7041/model"
    model = Path(address.removeprefix("file://"))
    assert {"config.json", "model.safetensors", "lathe.json"} <= {p.name for p in model.iterdir()}
    assert not model.with_name("model.state").exists()  # saved states are deleted at the end
    assert sorted(path.name for path in left.iterdir() if not path.name.startswith(".")) == [
        *("metrics", "model", "model.mirror", "page"),
    ]
    assert mine.read_text() == "stays"


def test_a_trainjob_writes_to_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv(STORE, f"file://{tmp_path}/pvc/")
    monkeypatch.setattr(artifact_types, "_MINIO_LOCAL_MOUNT_PREFIX", f"{tmp_path}/minio/")
    data = dsl.Dataset(name="data", uri=f"{ROOT}/prepare/7/data")
    store = f"file://{tmp_path}/pvc/pretrain/{RUN}"
    Path(data.path).mkdir(parents=True)
    (Path(data.path) / POINTER).write_text(f"{store}/prepare/7/data\n")
    ran: list[list[str]] = []

    def run(command: list[str], *_: object) -> Usage:
        ran.append(command)
        folder = Path(command[-1].removeprefix("file://"))
        folder.mkdir(parents=True)
        (folder / "weights").write_text("of the job")
        return Usage(gpu_hours=16.0)

    monkeypatch.setattr(trainjob, "run", run)
    monkeypatch.setattr(training, "fetch", lambda *_: None)
    monkeypatch.setattr(training, "_finish", lambda *_: {"steps": 3})
    output, page = dsl.Model(name="model", uri=f"{ROOT}/pretrain/8/model"), dsl.HTML()
    command = ["pretrain", "--data", data, "--output", output]
    recipe = load_recipe("tiny", ["Launch.nodes=2", "Distributed.dp_degree=2"])
    figures = training.train(recipe, command, output, page, lambda: None)
    assert figures == {"steps": 3, "usage.gpu_hours": 16.0}
    address = f"{store}/pretrain/8/model"
    assert ran == [["pretrain", "--data", f"{store}/prepare/7/data", "--output", address]]
    assert output.uri == f"{ROOT}/pretrain/8/model" and resolve_pointer(output) == address
    (found,) = local(output)
    assert found and (found / "weights").read_text() == "of the job"


def test_without_the_variable_artifacts_stay_where_pipelines_puts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    monkeypatch.delenv(STORE, raising=False)
    uri = f"{ROOT}/pretrain/8/model"
    assert output_address(dsl.Model(name="model", uri=uri)) == uri
