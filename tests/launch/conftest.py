"""Fixtures of a fake cluster for the launcher, with the pod in which it runs."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lathe_launch.cluster import trainjob
from tests.support.fake_kubernetes import SECOND, FakeKubernetes
from tests.support.fake_trainer import TRAINJOBS
from tests.support.launchers import launcher_pod


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def in_pod(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeKubernetes:
    """Set the environment as in the pod `step-1` of the fake cluster."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: time.sleep(SECOND * s))
    monkeypatch.setattr(trainjob, "time", quick)
    for name, value in launcher_pod(server, "step-1").items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def nothing_left(server: FakeKubernetes) -> Iterator[None]:
    """Check after the test that no TrainJob is left; pods may take a moment to terminate."""
    yield
    end = time.monotonic() + 180
    while server.list(TRAINJOBS) or server.list("pods", labels="jobset.sigs.k8s.io/jobset-name"):
        assert time.monotonic() < end, "a TrainJob or its pods are left over"
        time.sleep(0.05)
