"""Launchers as processes that are killed, restarted, or terminated."""

import os
import signal
import time

import pytest

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code
from lathe_launch.cluster.api import connect
from lathe_launch.cluster.manifest import find_launcher
from lathe_launch.cluster.trainjob import _Attempts
from lathe_launch.shape import Shape, WorkerFailed
from tests.support.errors import raises
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import TRAINJOBS, Pod
from tests.support.launchers import (
    COMMAND,
    count_requests,
    eventually,
    launcher,
    play,
    run_until_terminated,
    succeed,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("same_pod", [True, False])
@pytest.mark.slow
def test_a_killed_launchers_job_is_adopted(in_pod: FakeKubernetes, same_pod: bool) -> None:
    go_on = []

    def wait(pod: Pod) -> None:
        pod.start()
        pod.say("first")
        eventually(lambda: go_on or pod.terminated.is_set())
        pod.say("last")
        pod.end(0 if go_on else 75)

    trainer = play(in_pod, wait)
    with launcher(in_pod) as first:
        assert first.stdout is not None and first.stdout.readline() == "first\n"
        os.kill(first.pid, signal.SIGKILL)
    in_pod.patch("pods", "step-1", {"status": {"phase": "Running" if same_pod else "Failed"}})
    (job,) = in_pod.list(TRAINJOBS)
    with launcher(in_pod, "step-1" if same_pod else "step-2") as second:
        assert second.stdout is not None and second.stdout.readline() == "first\n"
        (adopted,) = in_pod.list(TRAINJOBS)
        (owner,) = adopted["metadata"]["ownerReferences"]
        assert owner["name"] == ("step-1" if same_pod else "step-2")
        assert adopted["metadata"]["uid"] == job["metadata"]["uid"]
        if not same_pod:
            in_pod.delete("pods", "step-1")  # must not delete the job: it has a new owner
        go_on.append(True)
        out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert out == "last\n" and "adopted" in err
    assert len(trainer.created) == 1


def test_an_adopted_job_keeps_its_count_of_failures(in_pod: FakeKubernetes) -> None:
    cluster, settings = connect(), LaunchSettings(restarts=1)
    work = cluster, find_launcher(cluster), COMMAND, Shape(), settings, 0.0
    failure = WorkerFailed(0, 1, "a loss of nan")
    first, second = _Attempts(*work), _Attempts(*work)
    first.begin()
    first.end(failure)
    left = first.begin()["metadata"]["name"]  # and the launcher is killed
    assert second.begin()["metadata"]["name"] == left
    with raises(Code.FAILED, "a loss of nan", kind=WorkerFailed):
        second.end(failure)
    cluster.delete(left)


@pytest.mark.slow
def test_a_job_deleted_with_its_owner_is_recreated(in_pod: FakeKubernetes) -> None:
    def slow_to_end(pod: Pod) -> None:
        if pod.attempt == 2:
            return succeed(pod)
        pod.start()
        pod.say("first")
        pod.terminated.wait()
        time.sleep(3)
        pod.end(75)

    trainer = play(in_pod, slow_to_end)
    with launcher(in_pod) as first:
        assert first.stdout is not None and first.stdout.readline() == "first\n"
        os.kill(first.pid, signal.SIGKILL)
    (job,) = in_pod.list(TRAINJOBS)
    name = job["metadata"]["name"]
    finalizers = {"metadata": {"finalizers": ["test/held"]}}
    in_pod.patch(TRAINJOBS, name, finalizers)
    in_pod.delete("pods", "step-1")
    assert in_pod.get(TRAINJOBS, name)["metadata"]["deletionTimestamp"]
    before = count_requests(in_pod, "GET")
    with launcher(in_pod, "step-2") as second:
        eventually(lambda: count_requests(in_pod, "GET") >= before + 2)
        in_pod.patch(TRAINJOBS, name, {"metadata": {"finalizers": []}})
        _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert "waiting for its pods to terminate" in err
    assert len(trainer.created) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_deletes_the_job(in_pod: FakeKubernetes, number: int) -> None:
    play(in_pod, run_until_terminated)
    with launcher(in_pod) as process:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(number)
        process.wait(timeout=60)
    assert process.returncode == 128 + number
