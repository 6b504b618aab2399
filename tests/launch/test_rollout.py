"""Rollouts against the fake Kubernetes: success, rollback after failures, and the lock."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.errors import Code, StageError
from lathe_launch.cluster import rollout
from lathe_launch.cluster.rollout import CAUSE, LOCK, RELEASE, Deployment
from tests.support.errors import raises
from tests.support.fake_deployments import NAME, Deployments, Served, deployment, until
from tests.support.fake_kubernetes import FakeKubernetes

GOOD, BETTER, CRASHES, HANGS = (f"s3://b/gpt/{n}/" for n in ("good", "better", "crashes", "hangs"))


class Nothing:
    def stop(self) -> None:
        pass


def program(release: str) -> Served | None:
    """Program of the pods, which serves, crashes or hangs according to the release's name."""
    if release == CRASHES:
        raise RuntimeError("tritonserver: no such operator: MatMulNBits")
    return None if release == HANGS else Nothing()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    for name, seconds in (("POLL_SECONDS", 0.05), ("RENEW_SECONDS", 0.1), ("LOCK_SECONDS", 1.0)):
        monkeypatch.setattr(rollout, name, seconds)
    with FakeKubernetes() as fake:
        monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig(tmp_path)))
        monkeypatch.delenv("POD_NAMESPACE", raising=False)
        yield fake


@pytest.fixture
def controller(cluster: FakeKubernetes) -> Deployments:
    """Controller of a Deployment with two ready pods of the release GOOD."""
    cluster.create("deployments.apps", deployment(GOOD))
    made = Deployments(cluster, program)
    made.start()
    until(lambda: len(made.ready) == 2)
    return made


def roll(release: str, back_to: str | None = GOOD, seconds: float = 20.0) -> None:
    serving = Deployment("lathe", NAME)
    with serving.locked():
        rollout.roll(serving, release, back_to, seconds)


def served(cluster: FakeKubernetes, controller: Deployments) -> set[str]:
    """Releases of the ready pods, once the Deployment has settled."""
    found = cluster.get("deployments.apps", NAME)
    assert LOCK not in found["metadata"]["annotations"]
    assert found["spec"]["template"]["metadata"]["annotations"][RELEASE] == (
        Deployment("lathe", NAME).release()
    )
    until(lambda: len(controller.pods) == 2)
    return {pod.release for pod in controller.ready}


def test_a_rollout_ends_when_only_new_pods_serve(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    before = cluster.get("deployments.apps", NAME)
    roll(BETTER)
    assert served(cluster, controller) == {BETTER}
    after = cluster.get("deployments.apps", NAME)
    assert BETTER in after["metadata"]["annotations"][CAUSE]
    (fetcher,) = after["spec"]["template"]["spec"]["initContainers"]
    (was,) = before["spec"]["template"]["spec"]["initContainers"]
    assert fetcher == was | {"env": [was["env"][0], {"name": "LATHE_RELEASE", "value": BETTER}]}

    generation = after["metadata"]["generation"]
    roll(BETTER)  # again: nothing to do
    assert cluster.get("deployments.apps", NAME)["metadata"]["generation"] == generation


def test_crashing_pods_are_reported_with_their_last_lines_and_the_old_release_serves_again(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    with raises(Code.FAILED, kind=StageError) as failed:
        roll(CRASHES)
    message = str(failed.value)
    assert f"{CRASHES}: pod {NAME}-" in message and re.search(r"crashed \d times", message)
    assert "exit code 1" in message and "no such operator: MatMulNBits" in message
    assert f"rolled back to {GOOD}, which is serving" in message
    assert served(cluster, controller) == {GOOD}


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [600, 1])
def test_a_rollout_that_hangs_goes_back(
    cluster: FakeKubernetes, controller: Deployments, deadline: int
) -> None:
    cluster.patch("deployments.apps", NAME, {"spec": {"progressDeadlineSeconds": deadline}})
    with raises(Code.TIMEOUT, kind=StageError) as failed:
        roll(HANGS, seconds=1.5 if deadline == 600 else 20.0)
    assert "containers with unready status" in str(failed.value)
    assert "rolled back to" in str(failed.value)
    assert served(cluster, controller) == {GOOD}


@pytest.mark.slow
def test_a_failed_rollback_is_reported_with_the_first_failure(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    with raises(Code.FAILED, kind=StageError) as failed:
        roll(CRASHES, back_to=HANGS, seconds=1.0)
    assert f"{CRASHES}: pod" in str(failed.value)
    assert f"rolling back to {HANGS} failed too: {HANGS}: " in str(failed.value)
    with raises(Code.FAILED, "no earlier release", kind=StageError):
        roll(CRASHES, back_to=None)


def test_one_of_two_concurrent_deployments_is_rejected(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    first = Deployment("lathe", NAME)
    began, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with first.locked():
            began.set()
            while not ended.wait(0.1):
                first.keep_lock()

    holder = threading.Thread(target=hold)
    holder.start()
    began.wait()
    try:
        with raises(Code.IN_USE, NAME, kind=StageError):
            roll(BETTER)
    finally:
        ended.set()
        holder.join()
    assert controller.history == [GOOD]
    roll(BETTER)
    assert served(cluster, controller) == {BETTER}


def test_the_lock_of_the_dead_is_taken_and_the_sleeper_learns_it(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    sleeper = Deployment("lathe", NAME)
    with raises(Code.IN_USE, "the lock was lost", kind=StageError), sleeper.locked():
        started = time.monotonic()
        waking = Deployment("lathe", NAME)
        with waking.locked():
            assert time.monotonic() - started > rollout.LOCK_SECONDS
            rollout.roll(sleeper, BETTER, GOOD, 5)
    assert served_release() == GOOD


def served_release() -> str | None:
    return Deployment("lathe", NAME).release()


def test_an_api_server_that_fails_for_a_while_is_asked_again(
    cluster: FakeKubernetes, controller: Deployments
) -> None:
    times = iter(range(1000))
    cluster.faults.append(lambda method, path: 503 if next(times) % 3 == 1 else None)
    roll(BETTER)
    cluster.faults.clear()
    assert served(cluster, controller) == {BETTER}


def test_mistakes_that_the_user_can_fix(cluster: FakeKubernetes) -> None:
    with raises(Code.NOT_FOUND, "lathe/lathe-serve"):
        Deployment("lathe", NAME)
    plain = deployment()
    del plain["spec"]["template"]["spec"]["initContainers"]
    cluster.create("deployments.apps", plain)
    with raises(Code.WRONG_KIND, "LATHE_RELEASE"):
        Deployment("lathe", NAME)
    cluster.denied.add(("get", "deployments"))
    with raises(Code.FORBIDDEN, "get deployments.apps"):
        Deployment("lathe", NAME)


def test_without_a_namespace_it_is_that_of_the_step_or_of_the_context(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path, namespace="kubeflow")))
    cluster.create("deployments.apps", deployment(GOOD), "kubeflow")
    assert Deployment(None, NAME).namespace == "kubeflow"
    monkeypatch.setenv("POD_NAMESPACE", "elsewhere")
    with raises(Code.NOT_FOUND, "elsewhere/"):
        Deployment(None, NAME)
