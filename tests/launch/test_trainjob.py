"""The launcher against the fake cluster: however it ends, no TrainJob is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lathe.errors import StageError, UserError
from lathe.launch import trainjob
from lathe.launch.follow import Patience
from lathe.launch.logs import nanoseconds
from lathe.launch.reasons import NodeFailed
from lathe.launch.shape import Shape, WorkerFailed
from lathe.settings import LaunchSettings
from tests.fake_kubernetes import USER, FakeKubernetes
from tests.fake_trainer import TRAINJOBS, Pod, Script, Trainer, processes
from tests.launch.conftest import launcher_pod

COMMAND = ["pretrain", "--data", "s3://bucket/data", "--output", "s3://bucket/dense"]
QUICK = Patience(look=1, scheduling=2.0, starting=1.0)


@pytest.fixture(autouse=True)
def _nothing_left(server: FakeKubernetes) -> Iterator[None]:
    """What every test of this file ends with; pods may take a moment to end."""
    yield
    eventually(lambda: not server.list(TRAINJOBS))
    eventually(lambda: not server.list("pods", labels="jobset.sigs.k8s.io/jobset-name"))


def eventually(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def asked(server: FakeKubernetes, method: str, name: str) -> int:
    """How often the TrainJob of that name was."""
    return sum(m == method and path.endswith(f"/trainjobs/{name}") for m, path in server.requests)


def play(server: FakeKubernetes, script: Script) -> Trainer:
    trainer = Trainer(server, script)
    trainer.start()
    return trainer


def launch(nodes: int = 1, processes: int = 1, **settings: Any) -> None:
    shape = Shape(nodes, processes)
    trainjob.run(COMMAND, shape, LaunchSettings(nodes=nodes, **settings), QUICK)


def succeed(pod: Pod) -> None:
    pod.start()
    pod.say(*(f"node {pod.node}, step {step}" for step in range(5)))
    pod.end()


def run_until_told(pod: Pod) -> None:
    pod.start()
    pod.say("training")
    pod.told_to_end.wait()
    pod.say("saved")
    pod.end(75)


@contextmanager
def launcher(
    server: FakeKubernetes, pod: str = "step-1", **work: Any
) -> Iterator[subprocess.Popen[str]]:
    """A launcher process in a pod of its own; `in_pod` has made `step-1`."""
    environment = dict(os.environ)
    if pod != "step-1":
        environment |= launcher_pod(server, pod)
    work = {"command": COMMAND, "patience": {"look": 1}, **work}
    command = [sys.executable, "-m", "tests.launch.launch_trainjob", json.dumps(work)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_success_shows_the_first_nodes_log(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = play(in_pod, succeed)
    launch(nodes=2)
    assert capfd.readouterr().out.splitlines() == [f"node 0, step {step}" for step in range(5)]
    assert len(trainer.created) == 1


def test_a_failed_worker_is_our_failure(in_pod: FakeKubernetes) -> None:
    def fail(pod: Pod) -> None:
        pod.start()
        pod.say(f"node {pod.node} begins")
        time.sleep(1)
        if pod.node == 1:
            pod.say("RuntimeError: a loss of nan")
            return pod.end(1)
        pod.told_to_end.wait()
        pod.end(75)

    trainer = play(in_pod, fail)
    with pytest.raises(WorkerFailed) as failed:
        launch(nodes=2, restarts=1)
    assert len(trainer.created) == 2
    assert failed.value.rank == 1 and failed.value.exit_code == 1 and failed.value.status == 1
    message = str(failed.value)
    assert "node 1 ended with exit code 1" in message and "a loss of nan" in message
    assert "[node 0] node 0 begins" in message


def test_out_of_memory_is_named(in_pod: FakeKubernetes) -> None:
    def hunger(pod: Pod) -> None:
        pod.start()
        pod.end(137, "OOMKilled")

    play(in_pod, hunger)
    with pytest.raises(NodeFailed, match=r"OOMKilled: it needs more than Launch\.memory"):
        launch(restarts=0, memory_per_node="6Gi")


def test_a_users_mistake_is_not_tried_again(in_pod: FakeKubernetes) -> None:
    def mistake(pod: Pod) -> None:
        pod.start()
        pod.say("error: there is no s3://bucket/data", "  cure: make it")
        pod.end(2)

    trainer = play(in_pod, mistake)
    with pytest.raises(WorkerFailed, match="there is no s3://bucket/data\n  cure: make it") as said:
        launch(restarts=5)
    assert said.value.status == UserError.status
    assert len(trainer.created) == 1


@pytest.mark.parametrize("by", ["condition", "exit status"])
def test_preemption_costs_no_restart(in_pod: FakeKubernetes, by: str) -> None:
    def preempted_twice(pod: Pod) -> None:
        if pod.attempt == 3:
            return succeed(pod)
        pod.start()
        if pod.node == 0:
            pod.say("on its way")
            time.sleep(0.5)
            if by == "condition":
                pod.disrupt("EvictionByEvictionAPI", "Eviction API: evicting")
                return pod.end(143)
            return pod.end(75)
        pod.told_to_end.wait()
        pod.end(1)  # it lost its peer

    trainer = play(in_pod, preempted_twice)
    launch(nodes=2, restarts=0)
    assert len(trainer.created) == 3
    assert all(job["metadata"]["annotations"]["lathe/failures"] == "0" for job in trainer.created)
    assert len({job["metadata"]["name"] for job in trainer.created}) == 1


def test_an_attempt_waits_for_the_pods_of_the_last(in_pod: FakeKubernetes) -> None:
    running: list[int] = []
    beside_the_second: list[int] = []

    def slow_to_end(pod: Pod) -> None:
        if pod.attempt == 2:
            beside_the_second.extend(running)
            return succeed(pod)
        if pod.node == 0:
            pod.start()
            return pod.end(1)
        running.append(pod.attempt)
        pod.start()
        pod.told_to_end.wait()
        time.sleep(1.5)
        running.remove(pod.attempt)

    trainer = play(in_pod, slow_to_end)
    launch(nodes=2, restarts=1)
    assert len(trainer.created) == 2 and not beside_the_second


def test_unschedulable_until_it_is_enough(in_pod: FakeKubernetes) -> None:
    def nowhere(pod: Pod) -> None:
        pod.unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        pod.told_to_end.wait()

    trainer = play(in_pod, nowhere)
    with pytest.raises(UserError, match=r"3 Insufficient nvidia\.com/gpu") as said:
        launch(nodes=2, gpus_per_node=8, node_pool="a100")
    assert "Launch.node_pool=a100" in said.value.cure and "8 GPUs" in said.value.cure
    assert len(trainer.created) == 1


def test_a_place_that_comes_late(in_pod: FakeKubernetes) -> None:
    def late(pod: Pod) -> None:
        pod.unschedulable("0/3 nodes are available")
        time.sleep(1)
        succeed(pod)

    play(in_pod, late)
    launch()


def test_an_image_that_is_not_there(in_pod: FakeKubernetes, monkeypatch: Any) -> None:
    def no_image(pod: Pod) -> None:
        pod.wait("ErrImagePull", "not found")
        time.sleep(0.5)
        pod.wait("ImagePullBackOff", "Back-off pulling image")
        pod.told_to_end.wait()

    monkeypatch.setenv("LATHE_TRAIN_IMAGE", "registry/lathe-train:none")
    play(in_pod, no_image)
    with pytest.raises(UserError, match="registry/lathe-train:none cannot be pulled"):
        launch()


def test_the_deadline(in_pod: FakeKubernetes) -> None:
    play(in_pod, run_until_told)
    with pytest.raises(StageError, match=r"Launch.deadline_hours=0.0005\d* have passed"):
        launch(deadline_hours=2 / 3600)


def test_a_queue_is_waited_for(in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(in_pod, succeed)
    trainer.admits = False
    trainer.start()
    with launcher(in_pod, settings={"queue": "training"}) as process:
        (job,) = eventually(lambda: trainer.created)
        eventually(lambda: asked(in_pod, "GET", job["metadata"]["name"]) >= 2)
        trainer.admit(job["metadata"]["name"])
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "waits for its quota in the queue training" in err and "step 4" in out
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def test_a_log_that_breaks_off_is_whole(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"line {number} of many" for number in range(60)] + ["", "the same", "the same"]

    def talk(pod: Pod) -> None:
        pod.start()
        for line in lines:
            pod.say(line)
            time.sleep(0.1)
        pod.end()

    in_pod.log_cuts += [7, 3, 0]
    play(in_pod, talk)
    launch()
    assert capfd.readouterr().out.splitlines() == lines
    assert not in_pod.log_cuts


def test_an_api_server_that_stumbles(in_pod: FakeKubernetes) -> None:
    paths: list[str] = []

    def stumble(method: str, path: str) -> int | None:
        paths.append(path)
        if len(paths) == 12:
            in_pod.compact()  # what a watch goes on from is forgotten: 410
        return (500, 503, 429, None, 401)[len(paths) % 5] if len(paths) < 20 else None

    def slow(pod: Pod) -> None:
        pod.start()
        time.sleep(4)
        pod.end()

    in_pod.faults.append(stumble)
    trainer = play(in_pod, slow)
    launch()
    assert len(trainer.created) == 1 and len(paths) > 12


def test_what_is_forbidden_names_its_cure(in_pod: FakeKubernetes) -> None:
    in_pod.denied.add(("create", "trainjobs"))
    with pytest.raises(UserError) as said:
        launch()
    assert f"{USER} may not create trainjobs.trainer.kubeflow.org in namespace lathe" in str(
        said.value
    )
    assert "Role lathe-pipeline" in said.value.cure


def test_logs_that_are_forbidden_do_not_stop_it(in_pod: FakeKubernetes) -> None:
    in_pod.denied.add(("get", "pods/log"))
    play(in_pod, succeed)
    launch()


def test_outside_of_a_pod(in_pod: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KFP_POD_NAME")
    with pytest.raises(UserError, match="there is no pod"):
        launch()


@pytest.mark.parametrize("same_pod", [True, False])
def test_a_killed_launchers_job_is_adopted(in_pod: FakeKubernetes, same_pod: bool) -> None:
    go_on = []

    def wait(pod: Pod) -> None:
        pod.start()
        pod.say("first")
        eventually(lambda: go_on or pod.told_to_end.is_set())
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
            in_pod.delete("pods", "step-1")  # the old owner's end is not the job's any more
        go_on.append(True)
        out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert out == "last\n" and "adopted" in err
    assert len(trainer.created) == 1


def test_a_job_that_goes_with_its_owner_is_made_anew(in_pod: FakeKubernetes) -> None:
    def slow_to_end(pod: Pod) -> None:
        if pod.attempt == 2:
            return succeed(pod)
        pod.start()
        pod.say("first")
        pod.told_to_end.wait()
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
    before = asked(in_pod, "GET", name)
    with launcher(in_pod, "step-2") as second:
        eventually(lambda: asked(in_pod, "GET", name) >= before + 2)
        in_pod.patch(TRAINJOBS, name, {"metadata": {"finalizers": []}})
        _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert "waiting for its pods to end" in err
    assert len(trainer.created) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_deletes_the_job(in_pod: FakeKubernetes, number: int) -> None:
    play(in_pod, run_until_told)
    with launcher(in_pod) as process:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(number)
        process.wait(timeout=60)
    assert process.returncode == 128 + number


def test_the_manifest(in_pod: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-the-manifest")
    monkeypatch.setenv("LATHE_S3_SECRET_DIR", "/secrets")
    monkeypatch.setenv("UNRELATED", "value")
    settings = {"gpus_per_node": 2, "node_pool": "a100", "queue": "training", "priority": "high"}
    trainer = play(in_pod, succeed)
    launch(nodes=2, processes=2, shared_memory="4Gi", **settings)
    (job,) = trainer.created
    said = json.dumps(job)
    assert "an-access-key" not in said and "not-for-the-manifest" not in said
    assert "UNRELATED" not in said and "LATHE_S3_SECRET_DIR" not in said
    assert re.fullmatch("lathe-pretrain-[0-9a-f]{12}", job["metadata"]["name"])
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/name": "lathe",
        "app.kubernetes.io/part-of": "lathe",
        "lathe/run-id": "5f0c31b2-run",
        "lathe/stage": "pretrain",
        "kueue.x-k8s.io/queue-name": "training",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert job["metadata"]["ownerReferences"][0]["name"] == "step-1"
    assert job["spec"]["activeDeadlineSeconds"] in range(240 * 3600 - 60, 240 * 3600 + 1)
    assert job["spec"]["runtimeRef"]["name"] == "lathe-torch"
    work = job["spec"]["trainer"]
    assert work["image"] == "lathe-train:1"
    assert work["command"] == ["lathe"] and work["args"] == COMMAND
    assert work["numNodes"] == 2 and work["numProcPerNode"] == 2
    amounts = {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "2"}
    assert work["resourcesPerNode"] == {"limits": amounts, "requests": amounts}
    env = {variable["name"]: variable for variable in work["env"]}
    assert env["AWS_ENDPOINT_URL"]["value"] == "http://store:9000"
    reference = env["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "lathe-s3", "key": "secretkey"}
    patched = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patched["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"lathe/node-pool": "a100"}
    assert [taint["key"] for taint in pod["tolerations"]] == ["lathe/node-pool", "nvidia.com/gpu"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    container = pod["containers"][0]["securityContext"]
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    shared_memory = {"medium": "Memory", "sizeLimit": "4Gi"}
    assert pod["volumes"][0] == {"name": "shared-memory", "emptyDir": shared_memory}


def test_a_priority_without_a_queue(in_pod: FakeKubernetes) -> None:
    with pytest.raises(UserError, match=r"Launch\.priority=high"):
        launch(priority="high")


def test_the_name_is_of_the_run_and_the_work(in_pod: FakeKubernetes) -> None:
    trainer = play(in_pod, succeed)
    for settings in ({}, {}, {"cpus_per_node": 8}):
        launch(**settings)
        eventually(lambda: not in_pod.list(TRAINJOBS))
    names = [job["metadata"]["name"] for job in trainer.created]
    assert names[0] == names[1] != names[2]


def test_a_command_that_is_really_run(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"accesskey": "YWNjZXNz", "secretkey": "c2VjcmV0"}
    in_pod.create("secrets", {"metadata": {"name": "lathe-s3"}, "data": keys})
    play(in_pod, processes)
    trainjob.run(["recipe", "tiny"], Shape(2, 1), LaunchSettings(nodes=2), QUICK)
    assert "Engine:" in capfd.readouterr().out
    with pytest.raises(WorkerFailed, match="none/such") as said:
        trainjob.run(["recipe", "none/such"], Shape(2, 1), LaunchSettings(nodes=2), QUICK)
    assert said.value.status == UserError.status


@pytest.mark.parametrize(
    ("stamp", "after"),
    [
        ("1970-01-01T00:00:01.000000001Z", 1_000_000_001),
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T02:00:01.5+02:00", 1_500_000_000),
    ],
)
def test_time_stamps(stamp: str, after: int) -> None:
    assert nanoseconds(stamp) == after
