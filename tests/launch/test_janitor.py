"""The janitor as a process deletes what killed launchers left behind, and nothing else."""

import json
import os
import signal
import subprocess
from datetime import UTC, datetime, timedelta

from tests.support import warm
from tests.support.fake_kubernetes import FakeKubernetes, Object
from tests.support.fake_trainer import TRAINJOBS, Trainer
from tests.support.launchers import eventually, launcher, launcher_pod, run_until_terminated

OURS = {"app.kubernetes.io/name": "lathe", "app.kubernetes.io/part-of": "lathe"}


def janitor(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*warm.python(), "-m", "lathe_launch.cluster.janitor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def make(
    server: FakeKubernetes, name: str, pod: str, labels: Object = OURS, hours: int = 1
) -> None:
    """Create a TrainJob owned by the launcher `pod` whose deadline is in `hours` hours."""
    deadline = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    uid = server.get("pods", pod)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    metadata = {"name": name, "labels": labels, "annotations": {"lathe/deadline": deadline}}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**metadata, "ownerReferences": [owner]},
        "spec": {"runtimeRef": {"name": "lathe-torch"}},
    }
    server.create(TRAINJOBS, job)


def end(server: FakeKubernetes, pod: str, minutes_ago: int) -> None:
    finished = (datetime.now(UTC) - timedelta(minutes=minutes_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"terminated": {"exitCode": 137, "finishedAt": finished}}
    status = {"name": "main", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    statuses = [status | {"state": state}]
    server.patch("pods", pod, {"status": {"phase": "Failed", "containerStatuses": statuses}})


def names(server: FakeKubernetes) -> list[str]:
    return [job["metadata"]["name"] for job in server.list(TRAINJOBS)]


def test_a_killed_launchers_job_goes(in_pod: FakeKubernetes) -> None:
    Trainer(in_pod, run_until_terminated).start()
    with launcher(in_pod) as process:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        os.kill(process.pid, signal.SIGKILL)
    (name,) = names(in_pod)
    assert f"kept {name}" in janitor().stdout
    end(in_pod, "step-1", minutes_ago=20)
    done = janitor()
    assert done.stdout == f"deleted {name}: the pod step-1 has ended\n", done.stderr
    eventually(lambda: not names(in_pod))
    eventually(lambda: not in_pod.list("pods", labels="jobset.sigs.k8s.io/jobset-name"))


def test_only_what_is_left_goes(in_pod: FakeKubernetes) -> None:
    for pod in ("running", "ended-long-ago", "ended-just-now"):
        launcher_pod(in_pod, pod)
        make(in_pod, f"of-{pod}", pod)
    end(in_pod, "ended-long-ago", 11)
    end(in_pod, "ended-just-now", 1)
    make(in_pod, "late", "running", hours=-2)
    make(in_pod, "of-others", "ended-long-ago", labels={"app.kubernetes.io/name": "other"})
    before = names(in_pod)
    would = janitor("--dry-run")
    assert "would delete of-ended-long-ago: the pod ended-long-ago has ended" in would.stdout
    assert names(in_pod) == before
    done = janitor()
    assert done.returncode == 0, done.stderr
    assert "deleted late: its deadline" in done.stdout
    assert names(in_pod) == ["of-ended-just-now", "of-others", "of-running"]
    assert "deleted of-ended-just-now" in janitor("--grace-minutes", "0").stdout
    assert names(in_pod) == ["of-others", "of-running"]


def test_a_launcher_that_is_gone(in_pod: FakeKubernetes) -> None:
    """A finalizer keeps the orphaned job from being garbage-collected."""
    launcher_pod(in_pod, "gone")
    make(in_pod, "orphan", "gone")
    in_pod.patch(TRAINJOBS, "orphan", {"metadata": {"finalizers": ["test/held"]}})
    in_pod.delete("pods", "gone")
    assert "deleted orphan: the pod gone no longer exists" in janitor().stdout


def test_forbidden_requests(in_pod: FakeKubernetes) -> None:
    in_pod.denied.add(("list", "trainjobs"))
    refused = janitor("--namespace", "lathe")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error[forbidden]: ")
    assert "list trainjobs.trainer.kubeflow.org" in refused.stderr
    assert "Role lathe-janitor" in refused.stderr


def test_another_namespace(in_pod: FakeKubernetes) -> None:
    done = janitor("--namespace", "elsewhere")
    assert done.returncode == 0 and done.stdout == ""
    paths = json.dumps(in_pod.requests)
    assert "/namespaces/elsewhere/trainjobs" in paths and "/namespaces/lathe/" not in paths
