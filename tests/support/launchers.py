"""Runs launchers, in this process or in a new one, and scripts for the pods they create."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lathe_base.config.settings import LaunchSettings
from lathe_launch.cluster import trainjob
from lathe_launch.cluster.follow import Patience
from lathe_launch.shape import Shape
from lathe_launch.usage import Usage
from tests.support import warm
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import Pod, Script, Trainer

COMMAND = ["pretrain", "--data", "s3://bucket/data", "--output", "s3://bucket/dense"]
RUN_ID = "5f0c31b2-run"
QUICK = Patience(look=1, scheduling=2.0, starting=1.0, silence=0.5, backoff=0.1)


def launcher_pod(server: FakeKubernetes, name: str) -> dict[str, str]:
    """Create the pod of a step; returns the environment that Kubeflow Pipelines sets in it."""
    containers = [{"name": "wait", "image": "argo"}, {"name": "main", "image": "lathe-train:1"}]
    pod = {
        "metadata": {"name": name, "labels": {"pipeline/runid": RUN_ID}},
        "spec": {"containers": containers},
        "status": {"phase": "Running"},
    }
    uid = server.create("pods", pod)["metadata"]["uid"]
    return {"KFP_POD_NAME": name, "KFP_POD_UID": uid}


def eventually(holds: Callable[[], Any], seconds: float = 240.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"condition not met after {seconds} s"
        time.sleep(0.05)
    return found


def count_requests(server: FakeKubernetes, method: str, name: str = "") -> int:
    """Number of requests for the TrainJob of that name, or for the list of TrainJobs."""
    suffix = f"/trainjobs/{name}".rstrip("/")
    paths = [path.partition("?")[0] for m, path in server.requests if m == method]
    return sum(path.endswith(suffix) for path in paths)


def play(server: FakeKubernetes, script: Script) -> Trainer:
    trainer = Trainer(server, script)
    trainer.start()
    return trainer


def launch(nodes: int = 1, processes: int = 1, **settings: Any) -> Usage:
    shape = Shape(nodes, processes)
    return trainjob.run(COMMAND, shape, LaunchSettings(nodes=nodes, **settings), QUICK)


def succeed(pod: Pod) -> None:
    pod.start()
    pod.say(*(f"node {pod.node}, step {step}" for step in range(5)))
    pod.end()


def run_until_terminated(pod: Pod) -> None:
    pod.start()
    pod.say("training")
    pod.terminated.wait()
    pod.say("saved")
    pod.end(75)


@contextmanager
def launcher(
    server: FakeKubernetes, pod: str = "step-1", **work: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher process, in a new pod unless `pod` is `step-1`, which `in_pod` creates."""
    environment = dict(os.environ)
    if pod != "step-1":
        environment |= launcher_pod(server, pod)
    work = {"command": COMMAND, "patience": {"look": 1}, **work}
    command = [*warm.python(), "-m", "tests.support.launch_trainjob", json.dumps(work)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
