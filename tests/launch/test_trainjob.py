"""The launcher against the fake cluster: however it ends, it leaves no TrainJob behind."""

import json
import time
from typing import Any

import pytest

from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_launch import local
from lathe_launch.cluster import trainjob
from lathe_launch.cluster.reasons import NodeFailed
from lathe_launch.shape import Shape, WorkerFailed
from lathe_launch.usage import Usage
from tests.support.errors import raises
from tests.support.fake_kubernetes import USER, FakeKubernetes
from tests.support.fake_trainer import Pod, Trainer, run_command
from tests.support.launchers import (
    QUICK,
    eventually,
    launch,
    launcher,
    play,
    run_until_terminated,
    succeed,
)
from tests.support.tables import quick_only

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_success_shows_the_first_nodes_log(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = play(in_pod, succeed)
    launch(nodes=2)
    assert capfd.readouterr().out.splitlines() == [f"node 0, step {step}" for step in range(5)]
    assert len(trainer.created) == 1


@pytest.mark.slow
def test_a_failed_worker_is_our_failure(in_pod: FakeKubernetes) -> None:
    def fail(pod: Pod) -> None:
        pod.start()
        pod.say(f"node {pod.node} begins")
        time.sleep(1)
        if pod.node == 1:
            pod.say("RuntimeError: a loss of nan")
            return pod.end(1)
        pod.terminated.wait()
        pod.end(75)

    trainer = play(in_pod, fail)
    with raises(Code.FAILED, "a loss of nan", kind=WorkerFailed) as failed:
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
    with raises(Code.OUT_OF_MEMORY, "Launch.memory_per_node", kind=NodeFailed):
        launch(restarts=0, memory_per_node="6Gi")


def nodes(server: FakeKubernetes, *sizes: str) -> None:
    for i, size in enumerate(sizes):
        node = {"metadata": {"name": f"n{i}"}, "status": {"allocatable": {"memory": size}}}
        server.create("nodes", node, "")


def memories(trainer: Trainer) -> list[str]:
    """Memory of a worker in each attempt."""
    specs = (job["spec"]["trainer"] for job in trainer.created)
    return [spec["resourcesPerNode"]["limits"]["memory"] for spec in specs]


@pytest.mark.parametrize("needs_gib", [8, 12])
def test_a_worker_without_memory_has_half_as_much_again_once(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture, needs_gib: int
) -> None:
    def hunger(pod: Pod) -> None:
        limit = pod.container["resources"]["limits"]["memory"]
        if int(limit.removesuffix("Gi")) >= needs_gib:
            return succeed(pod)
        pod.start()
        pod.end(137, "OOMKilled")

    nodes(in_pod, "16Gi")
    trainer = play(in_pod, hunger)
    if needs_gib > 9:
        with raises(Code.OUT_OF_MEMORY, "memory_per_node=9Gi", kind=NodeFailed):
            launch(restarts=0, memory_per_node="6Gi")
    else:
        launch(restarts=0, memory_per_node="6Gi")
    assert memories(trainer) == ["6Gi", "9Gi"]
    assert len({job["metadata"]["labels"]["lathe/work"] for job in trainer.created}) == 1
    (told,) = [message for message in caplog.messages if "ran out of memory" in message]
    assert "one more attempt has 9Gi instead of 6Gi" in told and "MEMORY=9Gi" in told


FULL = "of the nodes that it may run on, too few have it: n0 8.0 GiB"
QUOTA = "the quota lathe has 20Gi limits.memory, of which 6Gi are used"


@pytest.mark.parametrize(
    ("allocatable", "used", "denied", "said"),
    [
        ("8Gi", "0", "", FULL),
        ("16Gi", "6Gi", "", QUOTA),
        ("16Gi", "0", "nodes", "cannot list nodes"),
        ("16Gi", "0", "resourcequotas", "cannot list resourcequotas"),
    ],
)
def test_no_more_memory_than_quota_and_nodes_have(
    in_pod: FakeKubernetes,
    caplog: pytest.LogCaptureFixture,
    allocatable: str,
    used: str,
    denied: str,
    said: str,
) -> None:
    def hunger(pod: Pod) -> None:
        pod.start()
        pod.end(137, "OOMKilled")

    nodes(in_pod, allocatable, allocatable)
    status = {"hard": {"limits.memory": "20Gi"}, "used": {"limits.memory": used}}
    in_pod.create("resourcequotas", {"metadata": {"name": "lathe"}, "status": status})
    in_pod.denied.add(("list", denied))
    trainer = play(in_pod, hunger)
    with raises(Code.OUT_OF_MEMORY, kind=NodeFailed):
        launch(nodes=2, restarts=0, memory_per_node="6Gi")
    assert memories(trainer) == ["6Gi"]
    assert "not tried with 9Gi of memory instead of 6Gi: " in caplog.text and said in caplog.text


def test_what_all_attempts_have_used(in_pod: FakeKubernetes) -> None:
    def lose_one(pod: Pod) -> None:
        pod.start(waited_seconds=600 if pod.node else 60)
        if pod.attempt == 1 and pod.node == 1:
            return
        used = Usage(cpu_hours=2.0, peak_memory_gib=3.0 * pod.attempt)
        code = 75 if pod.attempt == 1 else 0
        pod.end(code, message=json.dumps(used.figures), ran_seconds=3600)

    play(in_pod, lose_one)
    used = launch(nodes=2, restarts=0, gpus_per_node=4)
    assert used.hours is None  # those of the launcher count
    assert used.gpu_hours == pytest.approx(3 * 4, abs=0.2)  # the fourth pod was deleted at once
    assert used.cpu_hours == 3 * 2.0 and used.peak_memory_gib == 6.0
    # Whether the pod that was deleted had started is not always seen.
    assert 600 + 60 - 4 < (used.waited_seconds or 0.0) < 600 + 600 + 60


def test_a_users_mistake_is_not_tried_again(in_pod: FakeKubernetes) -> None:
    def mistake(pod: Pod) -> None:
        pod.start()
        pod.say("error[not-found]: there is no s3://bucket/data", "  hint: make it")
        pod.end(2)

    trainer = play(in_pod, mistake)
    text = "there is no s3://bucket/data\n  hint: make it"
    with raises(Code.NOT_FOUND, text, kind=WorkerFailed) as said:
        launch(restarts=5)
    assert said.value.status == UserError.status
    assert len(trainer.created) == 1


@pytest.mark.parametrize("by", quick_only(["condition", "exit status"], ["condition"]))
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
                time.sleep(1)  # the grace period
                return pod.end(143)
            return pod.end(75)
        pod.terminated.wait()
        pod.end(1)  # lost its peer

    trainer = play(in_pod, preempted_twice)
    launch(nodes=2, restarts=0)
    assert len(trainer.created) == 3
    assert all(job["metadata"]["annotations"]["lathe/failures"] == "0" for job in trainer.created)
    assert len({job["metadata"]["name"] for job in trainer.created}) == 3
    assert trainer.pods_made == 3 * 2  # no pods of a JobSet that Trainer created again


@pytest.mark.parametrize(
    ("nodes", "said"), [(1, "; all nodes have saved their state\n"), (2, "\n")]
)
def test_saved_state_is_claimed_only_where_all_nodes_saved_it(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture, nodes: int, said: str
) -> None:
    def preempted(pod: Pod) -> None:
        if pod.attempt == 2:
            return succeed(pod)
        pod.start()
        if pod.node == 0:
            time.sleep(0.5)
            return pod.end(75)
        pod.terminated.wait()
        pod.end(137)

    play(in_pod, preempted)
    launch(nodes=nodes, restarts=0)
    assert f"node 0 was terminated{said}" in caplog.text


def test_workers_have_the_pods_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(local, "run_node", lambda _, __, seconds: given.append(seconds))
    monkeypatch.delenv("RANK", raising=False)
    shape = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "0"}
    for name, value in {**shape, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert local.start_workers(["pretrain"], load_recipe("tiny", []))
    assert given == [290]


@pytest.mark.slow
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
        pod.terminated.wait()
        time.sleep(1.5)
        running.remove(pod.attempt)

    trainer = play(in_pod, slow_to_end)
    launch(nodes=2, restarts=1)
    assert len(trainer.created) == 2 and not beside_the_second


@pytest.mark.slow
@pytest.mark.parametrize("admitted", [0, 1])
def test_reasons_for_pending_pods_are_reported(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture, admitted: int
) -> None:
    """With quota for one of two pods, that pod starts and waits silently for the other."""

    def wait(pod: Pod) -> None:
        pod.start()
        pod.terminated.wait()

    caplog.set_level("INFO")
    trainer = Trainer(in_pod, wait)
    trainer.refusal = 'pods "x" is forbidden: exceeded quota: lathe, requested: cpu=8'
    trainer.admitted = admitted
    trainer.start()
    lack = f"has pods for {admitted} of 2 nodes after"
    with raises(Code.NO_ROOM, lack, "FailedCreate: ", "exceeded quota"):
        launch(nodes=2, restarts=3)
    (told,) = [message for message in caplog.messages if lack in message]
    assert "exceeded quota: lathe" in told
    assert len(trainer.created) == 1


def test_an_eviction_for_what_a_pod_uses_costs_a_restart(in_pod: FakeKubernetes) -> None:
    """Unlike a preemption: the pod would be evicted over and over."""

    def fill_the_disk(pod: Pod) -> None:
        pod.start()
        pod.evict("The node was low on resource: ephemeral-storage.")

    trainer = play(in_pod, fill_the_disk)
    with raises(Code.FAILED, "low on resource: ephemeral-storage", kind=NodeFailed):
        launch(restarts=1)
    assert len(trainer.created) == 2


@pytest.mark.slow
def test_the_pause_before_a_restart_doubles(in_pod: FakeKubernetes) -> None:
    def preempted(pod: Pod) -> None:
        pod.start()
        pod.end(75) if pod.attempt < 3 else succeed(pod)

    play(in_pod, preempted)
    pauses: list[float] = []
    asleep = trainjob.time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainjob.time, "sleep", lambda s: (pauses.append(s) if s < 1 else None, asleep(s))[1]
        )
        launch(restarts=0)
    assert [s for s in pauses if s in (0.1, 0.2, 0.4)] == [0.1, 0.2]


@pytest.mark.slow
def test_unschedulable_until_it_is_enough(in_pod: FakeKubernetes) -> None:
    def nowhere(pod: Pod) -> None:
        pod.unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        pod.terminated.wait()

    trainer = play(in_pod, nowhere)
    with raises(Code.NO_ROOM, "3 Insufficient nvidia.com/gpu") as said:
        launch(nodes=2, gpus_per_node=8, node_pool="a100")
    assert "Launch.node_pool=a100" in said.value.hint and "8 GPUs" in said.value.hint
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
        pod.terminated.wait()

    monkeypatch.setenv("LATHE_TRAIN_IMAGE", "registry/lathe-train:none")
    play(in_pod, no_image)
    with raises(Code.NOT_FOUND, "registry/lathe-train:none"):
        launch()


def test_the_deadline(in_pod: FakeKubernetes) -> None:
    play(in_pod, run_until_terminated)
    with raises(Code.TIMEOUT, "Launch.deadline_hours=0.0005", kind=StageError):
        launch(deadline_hours=2 / 3600)


def test_a_queue_is_waited_for(in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(in_pod, succeed)
    trainer.admits = False
    trainer.start()
    with launcher(in_pod, settings={"queue": "training"}) as process:
        (job,) = eventually(lambda: trainer.created)
        owner = {key: job["metadata"][key] for key in ("name", "uid")} | {"kind": "TrainJob"}
        full = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "full"}
        workload = {"metadata": {"name": "w", "ownerReferences": [owner]}}
        in_pod.create(
            "workloads.kueue.x-k8s.io", workload | {"spec": {}, "status": {"conditions": [full]}}
        )
        eventually(lambda: sum("/workloads" in path for _, path in in_pod.requests) >= 3)
        trainer.admit(job["metadata"]["name"])
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "waits for quota in the queue training: (Pending): full" in err and "step 4" in out
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


@pytest.mark.slow
def test_an_api_server_that_stumbles(in_pod: FakeKubernetes) -> None:
    paths: list[str] = []

    def stumble(method: str, path: str) -> int | None:
        paths.append(path)
        if len(paths) == 12:
            in_pod.compact()  # the watch's resource version expires: 410
        return (500, 503, 429, None, 401)[len(paths) % 5] if len(paths) < 20 else None

    def slow(pod: Pod) -> None:
        pod.start()
        time.sleep(4)
        pod.end()

    in_pod.faults.append(stumble)
    trainer = play(in_pod, slow)
    launch()
    assert len(trainer.created) == 1 and len(paths) > 12


def test_a_forbidden_request_has_a_hint(in_pod: FakeKubernetes) -> None:
    in_pod.denied.add(("create", "trainjobs"))
    with raises(Code.FORBIDDEN, f"{USER} cannot create trainjobs.trainer.kubeflow.org") as said:
        launch()
    assert "Role lathe-pipeline" in said.value.hint


def test_outside_of_a_pod(in_pod: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KFP_POD_NAME")
    with raises(Code.NOT_FOUND):
        launch()


def test_a_command_that_is_really_run(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"accesskey": "YWNjZXNz", "secretkey": "c2VjcmV0"}
    in_pod.create("secrets", {"metadata": {"name": "lathe-s3"}, "data": keys})
    play(in_pod, run_command)
    trainjob.run(["recipe", "tiny"], Shape(2, 1), LaunchSettings(nodes=2), QUICK)
    assert "Engine:" in capfd.readouterr().out
    with raises(Code.NOT_FOUND, "none/such", kind=WorkerFailed) as said:
        trainjob.run(["recipe", "none/such"], Shape(2, 1), LaunchSettings(nodes=2), QUICK)
    assert said.value.status == UserError.status
