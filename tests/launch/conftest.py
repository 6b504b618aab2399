"""A cluster for the launcher: the fake API server, with the pod that the launcher is in."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kubernetes import FakeKubernetes
from tests.fake_trainer import TRAINJOBS

RUN_ID = "5f0c31b2-run"


def launcher_pod(server: FakeKubernetes, name: str) -> dict[str, str]:
    """Make a step's pod; the environment that Kubeflow Pipelines gives it."""
    containers = [{"name": "wait", "image": "argo"}, {"name": "main", "image": "lathe-train:1"}]
    pod = {
        "metadata": {"name": name, "labels": {"pipeline/runid": RUN_ID}},
        "spec": {"containers": containers},
        "status": {"phase": "Running"},
    }
    uid = server.create("pods", pod)["metadata"]["uid"]
    return {"KFP_POD_NAME": name, "KFP_POD_UID": uid}


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def in_pod(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeKubernetes:
    """This process is in the pod `step-1` of the fake cluster."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    for name, value in launcher_pod(server, "step-1").items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def nothing_left(server: FakeKubernetes) -> Iterator[None]:
    """However the test's launchers end, no TrainJob is left; pods may take a moment to end."""
    yield
    end = time.monotonic() + 60
    while server.list(TRAINJOBS) or server.list("pods", labels="jobset.sigs.k8s.io/jobset-name"):
        assert time.monotonic() < end, "a TrainJob or its pods are left"
        time.sleep(0.05)
