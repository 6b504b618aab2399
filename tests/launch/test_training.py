"""A real training run as a TrainJob, with its artifacts in a real object store."""

import base64
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lathe_base.config.settings import LaunchSettings
from lathe_base.storage import exists, fetch
from lathe_launch.cluster import trainjob
from lathe_launch.shape import Shape
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import Pod, run_command
from tests.support.launchers import QUICK, eventually, play
from tests.support.mirrored_run import BATCH, train_uninterrupted
from tests.support.s3 import ACCESS_KEY, SECRET_KEY
from tests.support.small_run import SMALL

SETTINGS = (*SMALL, *BATCH, "Engine.save_load.save_steps=2")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.long
def test_two_nodes_one_of_which_is_preempted(
    in_pod: FakeKubernetes, s3: str, small_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    whole = train_uninterrupted(s3, small_data, tmp_path / "whole")
    keys = {"accesskey": ACCESS_KEY, "secretkey": SECRET_KEY}
    data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
    in_pod.create("secrets", {"metadata": {"name": "lathe-s3"}, "data": data})

    def preempted_once(pod: Pod) -> None:
        if pod.attempt == 1 and pod.node == 1:
            drain = threading.Thread(target=drained_when_saved, args=(pod,), daemon=True)
            drain.start()
        run_command(pod)

    def drained_when_saved(pod: Pod) -> None:
        eventually(lambda: exists(f"{s3}/run.state/steps.json"))
        pod.disrupt("EvictionByEvictionAPI", "Eviction API: evicting")

    trainer = play(in_pod, preempted_once)
    options = [part for setting in SETTINGS for part in ("-o", setting)]
    command = ["pretrain", "--data", f"{s3}/tokens", "--output", f"{s3}/run", *options]
    settings = LaunchSettings(nodes=2, restarts=0)
    trainjob.run(command, Shape(2, 1), settings, QUICK)
    assert len(trainer.created) == 2
    assert "resuming at step" in capfd.readouterr().out
    found = fetch(f"{s3}/run/", tmp_path / "found")
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, found))
    assert all(tensor.allclose(other[name], atol=1e-4) for name, tensor in one.items())
