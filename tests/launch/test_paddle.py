"""Multi-node training with the Paddle engine, which a step starts in its own runtime."""

import base64
import json
import tempfile
import threading
from pathlib import Path

import pytest
from kfp import dsl
from safetensors.numpy import load_file

from components.stage import options
from components.training import train
from lathe.backends.paddle_process import PYTHON_VARIABLE
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from lathe_base.storage import exists, fetch, upload, write_text
from lathe_launch.cluster import trainjob
from tests.support.errors import raises
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import Pod, run_command
from tests.support.launchers import QUICK, eventually, play, succeed
from tests.support.s3 import ACCESS_KEY, SECRET_KEY
from tests.support.small_run import SMALL
from tests.support.stages import prune

RECIPE = "tiny-prune-paddle"
BATCH = ("Global.global_batch_size=8", "Global.local_batch_size=", "Global.micro_batch_size=4")
SETTINGS = (*SMALL, *BATCH, "Engine.save_load.save_steps=2")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def step(in_pod: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> FakeKubernetes:
    """Make this process a pipeline's step on a cluster that has the store's secret."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    keys = {"accesskey": ACCESS_KEY, "secretkey": SECRET_KEY}
    data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
    in_pod.create("secrets", {"metadata": {"name": "lathe-s3"}, "data": data})
    return in_pod


def run(s3: str, verb: str, *overrides: str) -> dict[str, float]:
    """Run a verb on two nodes as the component does."""
    model, data, output = (
        dsl.Model(name=name, uri=f"{s3}/{name}") for name in ("dense", "tokens", "run")
    )
    chosen = [*SETTINGS, "Launch.nodes=2", "Distributed.dp_degree=2", *overrides]
    command = [verb, model, "--data", data, "--output", output, *options(RECIPE, chosen)]
    with tempfile.TemporaryDirectory() as folder:
        page = dsl.HTML(name="page", uri=f"{folder}/page.html")
        settings = load_recipe(RECIPE, chosen)
        figures = train(settings, command, output, page, lambda: pytest.fail("not here"))
        assert "data:image/svg+xml" in Path(page.path).read_text()  # the loss curve
        return figures


@pytest.mark.parametrize(
    ("verb", "override", "runtime"),
    [
        ("prune", "Compress.engine=paddle", "lathe-paddle"),
        ("quantize", "Compress.engine=paddle", "lathe-paddle"),
        ("pretrain", "Compress.engine=paddle", "lathe-torch"),
        ("prune", "Compress.engine=torch", "lathe-torch"),
        ("prune", "Launch.runtime=lathe-torch", "lathe-torch"),
    ],
)
def test_the_engine_has_its_runtime(
    step: FakeKubernetes,
    s3: str,
    paddle_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    override: str,
    runtime: str,
) -> None:
    monkeypatch.setattr(trainjob, "Patience", lambda: QUICK)
    trainer = play(step, succeed)
    write_text(f"{s3}/run/lathe.json", json.dumps({"metrics": {"step": 6}}))
    write_text(f"{s3}/run/train.jsonl", '{"step": 6, "loss": 5.5}\n')
    assert run(s3, verb, override)["step"] == 6
    (job,) = trainer.created
    assert job["spec"]["runtimeRef"]["name"] == runtime
    assert job["spec"]["trainer"]["image"] == "lathe-train:1"  # the image of the step


def test_a_step_without_paddle_starts_no_nodes(
    step: FakeKubernetes, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    trainer = play(step, succeed)
    with raises(Code.NOT_INSTALLED, "/nowhere/python") as said:
        run(s3, "prune")
    assert "ENGINE=paddle" in said.value.hint and not trainer.created


@pytest.mark.long
def test_two_nodes_one_of_which_is_preempted(
    step: FakeKubernetes,
    s3: str,
    paddle_python: Path,
    small_data: Path,
    small_dense: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    """Two nodes prune and finetune like a single process, after one of them is preempted.

    The pods run real processes, each with its own disk, and share data only through the store.
    """
    prune(load_recipe(RECIPE, SETTINGS), small_dense, small_data, tmp_path / "whole")
    upload(small_data, f"{s3}/tokens")
    upload(small_dense, f"{s3}/dense")

    def preempted_once(pod: Pod) -> None:
        if pod.attempt == 1 and pod.node == 1:
            threading.Thread(target=drained_when_saved, args=(pod,), daemon=True).start()
        run_command(pod)

    def drained_when_saved(pod: Pod) -> None:
        eventually(lambda: exists(f"{s3}/run.state/steps.json"))
        pod.disrupt("EvictionByEvictionAPI", "Eviction API: evicting")

    trainer = play(step, preempted_once)
    assert run(s3, "prune", "Launch.restarts=0")["step"] == 20
    assert len(trainer.created) == 2
    assert "resuming at step" in capfd.readouterr().out
    found = fetch(f"{s3}/run/", tmp_path / "found")
    one, two = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", found))
    assert one.keys() == two.keys()
    assert max(abs(one[name] - two[name]).max() for name in one) < 1e-4
    assert json.loads((found / "lathe.json").read_text())["engine"] == "paddle"
