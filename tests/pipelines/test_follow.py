"""Following a run, with recorded responses of real servers, and pods on a fake Kubernetes."""

import json
import logging
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kubernetes import client
from typer.testing import CliRunner

from lathe_launch.cluster.reasons import QUEUE
from pipelines.cluster.follow import GROUP_PREFIXES, GROUPS, app
from pipelines.cluster.pods import NODE
from pipelines.cluster.server import connect
from pipelines.compiler.compile import FUNCTIONS, built
from tests.support.fake_kfp import Refused, frame, task
from tests.support.fake_kubernetes import FakeKubernetes

RECORDED = Path(__file__).with_name("recorded")
BEGAN = datetime(2026, 1, 5, 3, tzinfo=UTC)
ERROR = (
    "[lathe] error[too-little-data]: corpus.txt: contains no text\n"
    "[lathe] error[too-little-data]:   hint: give another"
)


@pytest.fixture
def run(kfp):
    """Id of a run on the server."""
    kfp.runs["one"] = {"run_id": "one", "state": "RUNNING"}
    return "one"


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """The fake Kubernetes of the kube context."""
    with FakeKubernetes() as server:
        path = str(server.kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
        yield server


def follow(run: str, *options: str):
    return CliRunner().invoke(app, [run, *options])


def step_lines(output: str) -> list[str]:
    """Lines about steps, without times and durations."""
    lines = [line.split("  ", 1)[1] for line in output.splitlines() if line[2:3] == ":"]
    return [re.sub(r" \d+ s$", "", line) for line in lines]


def recorded(name: str) -> dict:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "status", "last"),
    [
        ("pretrain-pod-lost", 0, "evaluate-dense: done in"),
        ("pretrain-step-killed", 1, "pretrain: failed after"),
        ("pretrain-terminated", 1, "pretrain: failed after"),
        ("full-failed-step", 1, "pretrain: failed after"),
        ("full-succeeded", 0, "gate: done in"),
    ],
)
def test_every_step_of_a_real_run_is_reported_once(kfp, run, name, status, last):
    kfp.script = [recorded(name)]
    result = follow(run)
    assert result.exit_code == status, result.output
    lines = step_lines(result.output)
    assert len(lines) == len(set(lines)) and last in lines
    assert all(re.match(r"[a-z]+(-(dense|pruned|int8))?(: .*)?$", line) for line in lines)
    assert not any(line.startswith(("root", "executor", "condition")) for line in lines)
    assert "no logs, and no steps after a condition: no kube context" in result.output
    if name == "pretrain-terminated":
        assert "error[failed]: the run has been cancelled: " in result.output
    elif status:
        assert f"error[failed]: the run has failed: {kfp.url}/#/runs/details/one" in result.output
        selector = "-l pipeline/runid=.*,lathe/stage=pretrain -c main"
        assert re.search(
            rf"error\[failed\]: pretrain: its log: kubectl -n kubeflow logs {selector}",
            result.output,
        )


def pod(
    cluster: FakeKubernetes, stage: str, phase: str, name: str = "", node: str = "", **state: object
) -> str:
    """Create or update the pod of a step; `node` is its path in the workflow."""
    name = name or f"run-{stage}"
    main = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": phase, "containerStatuses": [main | {"state": state or waiting}]}
    if not any(found["metadata"]["name"] == name for found in cluster.list("pods")):
        labels = {"pipeline/runid": "one", "lathe/stage": stage}
        cluster.create(
            "pods",
            {
                "metadata": {"name": name, "labels": labels, "annotations": {NODE: node}},
                "spec": {"containers": [{"name": "main", "image": "i"}]},
            },
        )
    cluster.patch("pods", name, {"status": status})
    return name


def began(seconds: int) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def running(seconds: int) -> dict:
    return {"running": {"startedAt": began(seconds)}}


def ended(first: int, last: int, code: int = 0, reason: str = "Completed") -> dict:
    times = {"startedAt": began(first), "finishedAt": began(last)}
    return {"terminated": {"exitCode": code, "reason": reason, **times}}


class Story(list):
    """Functions that return the next frame on each request for the run; the last one repeats."""

    def __init__(self, *scenes) -> None:
        super().__init__(scenes)

    def __getitem__(self, index):
        return super().__getitem__(index)()

    def pop(self, index=0):
        return super().pop(index)()


def test_steps_within_a_condition_what_they_wait_for_and_their_logs(kfp, run, cluster):
    prepare = (task("prepare-driver", "SUCCEEDED"), task("prepare", "SUCCEEDED"))

    def from_the_cache():
        return frame("RUNNING", *prepare, task("condition-branches-1-driver", "RUNNING"))

    def waits():
        name = pod(cluster, "deploy", "Pending")
        message = "0/1 nodes are available: 1 Insufficient memory."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        cluster.patch("pods", name, {"status": {"conditions": [condition | {"message": message}]}})
        return from_the_cache()

    def runs():
        name = pod(cluster, "deploy", "Running", **running(60))
        cluster.patch("pods", name, {"status": {"conditions": []}})
        cluster.log(name, "[KFP Executor 1]: noise")
        cluster.log(name, "[lathe] 8 of 8 prompts the same")
        return from_the_cache()

    def listens():
        time.sleep(1.0)
        return from_the_cache()

    def ends():
        pod(cluster, "deploy", "Succeeded", **ended(60, 90))
        return frame("SUCCEEDED", *prepare)

    kfp.script = Story(from_the_cache, waits, runs, listens, ends, ends)
    result = follow(run)
    assert result.exit_code == 0, result.output
    assert step_lines(result.output) == [
        "prepare",
        "prepare: done in",
        "deploy waits: 0/1 nodes are available: 1 Insufficient memory.",
        "deploy",
        "deploy: done in",
    ]
    assert "    deploy: 8 of 8 prompts the same\n" in result.output and "noise" not in result.output
    assert "deploy: done in 30 s" in result.output


def test_a_queued_step_says_what_kueue_says(kfp, run, cluster):
    def gated():
        name = pod(cluster, "pretrain", "Pending")
        condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        cluster.patch("pods", name, {"status": {"conditions": [condition]}})
        cluster.patch("pods", name, {"metadata": {"labels": {QUEUE: "training"}}})
        return frame("RUNNING")

    def made():
        (found,) = cluster.list("pods")
        owner = {"kind": "Pod", "name": "run-pretrain", "uid": found["metadata"]["uid"]}
        metadata = {"name": "pod-run-pretrain", "ownerReferences": [owner]}
        cluster.create("workloads.kueue.x-k8s.io", {"metadata": metadata, "status": {}})
        words = {"type": "Warning", "reason": "Pending", "message": "flavor h100 not found"}
        about = {"kind": "Workload", "name": "pod-run-pretrain"}
        metadata = {"name": "first", "namespace": "lathe"}
        cluster.create("events", {"metadata": metadata, "involvedObject": about} | words)
        return frame("RUNNING")

    def ends():
        pod(cluster, "pretrain", "Succeeded", **ended(60, 90))
        return frame("SUCCEEDED")

    kfp.script = Story(gated, made, ends, ends)
    lines = step_lines(follow(run, "--no-logs").output)
    assert lines[:2] == [
        "pretrain waits: for quota in the queue training",
        "pretrain waits: for quota in the queue training: Pending: flavor h100 not found",
    ]


def test_a_lost_pod_is_another_attempt(kfp, run, cluster):
    def lost():
        pod(cluster, "pretrain", "Running", "first", **running(0))
        return frame("RUNNING")

    def again():
        pod(cluster, "pretrain", "Failed", "first", **ended(0, 50, 143, "Error"))
        time.sleep(1.1)  # pods are ordered by their creation time in seconds
        pod(cluster, "pretrain", "Running", "second", **running(60))
        return frame("RUNNING")

    def done():
        pod(cluster, "pretrain", "Succeeded", "second", **ended(60, 160))
        return frame("SUCCEEDED")

    kfp.script = Story(lost, again, done, done)
    lines = step_lines(follow(run, "--no-logs").output)
    assert lines[0] == "pretrain" and lines[-1] == "pretrain: done in"
    assert next(line for line in lines if "attempt" in line).startswith("pretrain, attempt 2: ")


def test_iterations_of_a_loop_are_distinguished(kfp, run, cluster):
    tasks = [task(f"tokenize{end}", "SUCCEEDED") for end in ("-driver", "")]
    tasks += [task(f"for-loop-2{end}", "SUCCEEDED") for end in ("-driver", "")]

    def done():
        for n in range(3):
            node = f"full-x(0).root(0).for-loop-2(0).iteration({n}:{n})(0).tokenize(0).executor(0)"
            pod(cluster, "tokenize", "Succeeded", f"pod-{n}", node, **ended(n, 60))
        return frame("SUCCEEDED", *tasks)

    kfp.script = Story(done, done)
    lines = step_lines(follow(run, "--no-logs").output)
    assert sorted(lines) == sorted(
        f"tokenize {n}{end}" for n in (1, 2, 3) for end in ("", ": done in")
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_of_a_pipeline_are_not_steps(name):
    spec = built(name).pipeline_spec
    for dag in [spec.root.dag, *(c.dag for c in spec.components.values())]:
        for task_name, task_spec in dag.tasks.items():
            is_part = bool(spec.components[task_spec.component_ref.name].dag.tasks)
            known = task_name in GROUPS or task_name.startswith(GROUP_PREFIXES)
            assert is_part == known, task_name


@pytest.mark.parametrize("logs", [True, False])
def test_a_failed_step_says_why(kfp, run, cluster, logs):
    def runs():
        name = pod(cluster, "prepare", "Running", **running(0))
        cluster.log(name, "[lathe] reading corpus.txt")
        return frame("RUNNING")

    def fails():
        for line in [*ERROR.splitlines(), *['    "executor_input": {}'] * 30]:
            cluster.log("run-prepare", line)
        pod(cluster, "prepare", "Failed", **ended(0, 12, 2, "Error"))
        return frame("FAILED")

    kfp.script = Story(runs, fails, fails)
    result = follow(run, "--logs" if logs else "--no-logs")
    assert result.exit_code == 1
    assert "prepare: failed after 12 s" in result.output
    assert ("    prepare: reading corpus.txt" in result.output) == logs
    assert (
        "last lines of prepare:\n    reading corpus.txt\n    error[too-little-data]: corpus"
        in result.output
    )
    assert "executor_input" not in result.output
    assert (
        "error[too-little-data]: prepare: corpus.txt: contains no text\n  hint: give"
        in result.output
    )
    assert "kubectl -n lathe logs run-prepare -c main" in result.output
    assert "error[failed]: the run has failed" in result.output


def test_a_step_that_was_killed_for_memory_has_a_hint(kfp, run, cluster):
    def fails():
        pod(cluster, "prune", "Failed", **ended(0, 12, 137, "OOMKilled"))
        return frame("FAILED")

    kfp.script = Story(fails, fails)
    output = follow(run).output
    assert "error[out-of-memory]: prune: exit code 137 (OOMKilled)\n" in output
    assert f"hint: make resume RUN={run} proposes how much more memory" in output


@pytest.mark.parametrize("stage", ["prune", ""], ids=["launcher", "driver"])
def test_a_step_that_could_not_reach_pipelines_has_a_hint(kfp, run, cluster, stage):
    def fails():
        name = pod(cluster, stage or "none", "Failed", **ended(0, 12, 1, "Error"))
        if not stage:
            cluster.patch("pods", name, {"metadata": {"labels": {"lathe/stage": None}}})
        cluster.log(name, "[lathe] wrote the model")
        away = "failed to create task: rpc error: code = Unavailable desc = connection refused"
        cluster.log(name, f"F1127 21:36:50.600954      15 main.go:59] {away}")
        return frame("FAILED")

    kfp.script = Story(fails, fails)
    output = follow(run).output
    assert output.count("  hint: Pipelines' API was away: make resume RUN=one takes") == 1


def test_a_driver_that_cannot_start_is_heard(kfp, run, cluster):
    def waits():
        node = "full-x(0).root(0).prepare-driver(0)"
        name = pod(cluster, "none", "Pending", "full-x-system-dag-driver-1", node)
        cluster.patch("pods", name, {"metadata": {"labels": {"lathe/stage": None}}})
        reason = {"reason": "CreateContainerConfigError", "message": 'secret "lathe-s3" not found'}
        main = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        waiting = main | {"state": {"waiting": reason}}
        cluster.patch("pods", name, {"status": {"containerStatuses": [waiting]}})
        return frame("RUNNING")

    kfp.script = Story(waits, lambda: frame("FAILED"), lambda: frame("FAILED"))
    output = follow(run).output
    said = 'prepare-driver waits: CreateContainerConfigError: secret "lathe-s3" not found'
    assert output.count(said) == 1


def test_a_driver_that_fails_says_why(kfp, run, cluster):
    """As in a run made in the UI, whose account may not do what steps do."""
    node = "full-x(0).root-driver(0)"
    name = pod(cluster, "none", "Failed", "full-x-system-dag-driver-1", node)
    cluster.patch("pods", name, {"metadata": {"labels": {"lathe/stage": None}}})
    forbidden = 'configmaps "kfp-launcher" is forbidden: User "default-editor" cannot get it'
    cluster.log(name, "I1127 21:36:50.535084      15 main.go:119] Setting log level to: '1'")
    cluster.log(name, f"F1127 21:36:50.600954      15 main.go:127] KFP driver: {forbidden}")
    cluster.log(name, 'time=2026-11-27 level=ERROR msg="cannot save parameter" argo=true')
    kfp.script = [frame("FAILED")]
    output = follow(run).output
    hint = "\n  hint: in the form of the UI, type the service account lathe-pipeline"
    assert f"error[failed]: KFP driver: {forbidden}{hint}" in output


def test_a_run_without_any_pod_says_what_argo_says(kfp, run, cluster):
    """As one made in the UI with the form as it is."""
    message = (
        'pods "full-x-1" is forbidden: error looking up service account lathe/default-editor: '
        'serviceaccount "default-editor" not found'
    )
    again = message.replace("full-x-1", "full-x-2")
    node = {"displayName": "root-driver(0)", "type": "Pod", "phase": "Error", "message": again}
    workflow = {
        "metadata": {"name": "full-x", "labels": {"pipeline/runid": "one"}},
        "status": {"phase": "Error", "message": message, "nodes": {"one": node}},
    }
    cluster.create("workflows.argoproj.io", workflow)
    kfp.script = [frame("FAILED")]
    output = follow(run).output
    hint = "\n  hint: in the form of the UI, type the service account lathe-pipeline"
    assert f"error[failed]: {message}\nerror[failed]: root-driver(0): {again}{hint}" in output
    assert output.count("hint:") == 1


def test_without_the_right_to_read_pods(kfp, run, cluster):
    cluster.denied.add(("list", "pods"))
    kfp.script = [recorded("pretrain-pod-lost")]
    result = follow(run)
    assert result.exit_code == 0
    assert "the Kubernetes API does not list pods: Forbidden" in result.output
    assert "pretrain: done in" in step_lines(result.output)


def test_a_page_that_the_api_server_has_not(kfp, run):
    kfp.has_pages = False
    kfp.script = [frame("FAILED")]
    assert "http://localhost:8080/#/runs/details/one" in follow(run).output


def test_a_run_that_is_unknown(kfp):
    result = follow("two")
    assert result.exit_code == 1 and "404" in result.output


def test_a_server_that_is_away_is_one_line(kfp, run):
    """The Kubernetes client resets the level of urllib3's logger to WARNING."""
    kfp.script = [frame("RUNNING"), frame("SUCCEEDED")]
    connect()
    client.Configuration()
    assert not logging.getLogger("urllib3.connectionpool").isEnabledFor(logging.WARNING)


def test_a_token_that_pipelines_cannot_check_is_not_a_wrong_one(kfp, run, monkeypatch):
    """While the API server of Kubernetes is away, Pipelines answers 401."""
    monkeypatch.setattr("pipelines.cluster.follow.REJECTED_SECONDS", 0)
    monkeypatch.setattr("pipelines.cluster.follow._get_run.retry.sleep", lambda seconds: None)
    answer, left = kfp.answer, [2]
    reviews = "https://10.96.0.1:443/apis/authentication.k8s.io/v1/tokenreviews"

    def refuse(request):
        if request.path.endswith("/runs/one") and left[0]:
            left[0] -= 1
            raise Refused(401, f'Failed to review the token provided: Post "{reviews}": dial tcp')
        return answer(request)

    monkeypatch.setattr(kfp, "answer", refuse)
    assert follow(run).exit_code == 0 and not left[0]


@pytest.mark.parametrize("trouble", ["empty", "rejected"])
def test_a_token_that_is_being_replaced_is_read_again(kfp, run, monkeypatch, tmp_path, trouble):
    kfp.token = "right"
    token = tmp_path / "token"
    token.write_text("right")
    monkeypatch.setenv("LATHE_KFP_TOKEN_FILE", str(token))
    sleep = time.sleep

    def replaced(seconds: float) -> None:
        """The command that wrote the token ends while `follow` waits."""
        token.write_text("right")
        sleep(min(seconds, 0.01))

    def running():
        token.write_text("" if trouble == "empty" else "wrong")
        return frame("RUNNING")

    monkeypatch.setattr("pipelines.cluster.follow._get_run.retry.sleep", replaced)
    kfp.script = Story(running, lambda: frame("SUCCEEDED"), lambda: frame("SUCCEEDED"))
    result = follow(run)
    assert result.exit_code == 0, result.output
    # The token before stands in for an empty file, while a request with a rejected one is repeated.
    is_told = "Pipelines does not answer; the run continues, retrying" in result.output
    assert is_told == (trouble == "rejected")
