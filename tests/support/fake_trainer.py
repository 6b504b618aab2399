"""Fakes of Kubeflow Trainer, JobSet and the kubelets on the fake Kubernetes API server.

A TrainJob becomes a JobSet and its pods, with the labels, environment and conditions that the real
controllers set. A script, a function of a `Pod`, decides what happens in a pod; the script
`run_command` runs the pod's command as a process on this machine.
"""

import base64
import os
import re
import subprocess
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lathe.backends.paddle_process import find_python
from lathe_base.ports import free_port
from lathe_launch.cluster.api import WORK
from tests.support import warm
from tests.support.fake_kubernetes import Controller, Event, FakeKubernetes, Object, Refused
from tests.support.fake_store import FOREGROUND

RUNTIMES = Path(__file__).parents[2] / "manifests" / "base" / "runtimes"
TRAINJOBS, JOBSETS = "trainjobs.trainer.kubeflow.org", "jobsets.jobset.x-k8s.io"
QUEUE = "kueue.x-k8s.io/queue-name"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
REACHED = "jobset failed due to reaching max number of restarts (first failed job: {}-node-0)"
COLLECTED = "test/collected"  # finalizer that delays garbage collection by COLLECTION_SECONDS
COLLECTION_SECONDS = 1
KUBELET = "test/kubelet"  # finalizer of a pod whose container may still be running
Script = Callable[["Pod"], None]


class Pod:
    """A pod as its script sees it; Pending until `start`.

    Attributes:
        node: completion index of the pod.
        attempt: number of the TrainJob among those of its step, from 1.
        terminated: set when the pod is deleted, in place of SIGTERM.
    """

    def __init__(self, server: FakeKubernetes, made: Object, node: int, attempt: int) -> None:
        self.server, self.node, self.attempt = server, node, attempt
        self.name, self.containers = made["metadata"]["name"], made["spec"]["containers"]
        self.container = self.containers[0]  # commands of other containers are not run
        self.uid = made["metadata"]["uid"]
        self.terminated = threading.Event()
        self.started: str | None = None
        self._late = timedelta()

    def _now(self) -> str:
        return (datetime.now(UTC) + self._late).strftime("%Y-%m-%dT%H:%M:%SZ")

    def unschedulable(self, message: str) -> None:
        self._condition("PodScheduled", "False", "Unschedulable", message)

    def wait(self, reason: str, message: str) -> None:
        self._status("Pending", {"waiting": {"reason": reason, "message": message}})

    def start(self, waited_seconds: float = 0.0) -> None:
        """Start the container, as if the pod had waited for its node."""
        self._late = timedelta(seconds=waited_seconds)
        self.started = self._now()
        self._condition("PodScheduled", "True", "", "")
        self._status("Running", {"running": {"startedAt": self.started}})

    def say(self, *lines: str) -> None:
        for line in lines:
            self.server.log(self.name, line)

    def disrupt(self, reason: str, message: str) -> None:
        """Set the disruption condition, then delete the pod, as when its node is drained."""
        self._condition("DisruptionTarget", "True", reason, message)
        self.server.delete("pods", self.name)

    def evict(self, message: str) -> None:
        """Fail the pod as the kubelet does when its node runs low on a resource."""
        self._condition("DisruptionTarget", "True", "TerminationByKubelet", message)
        status = {"phase": "Failed", "reason": "Evicted", "message": message}
        self.server.patch("pods", self.name, {"status": status})

    def end(
        self,
        code: int = 0,
        reason: str | None = None,
        message: str | None = None,
        ran_seconds: float = 0.0,
    ) -> None:
        """End the container, as if it had run that much longer.

        Args:
            message: what it has written to /dev/termination-log.
        """
        self._late += timedelta(seconds=ran_seconds)
        reason = reason or ("Error" if code else "Completed")
        ended = {"exitCode": code, "reason": reason, "finishedAt": self._now()}
        ended |= {"startedAt": self.started, "message": message}
        self._status("Failed" if code else "Succeeded", {"terminated": ended})

    def _status(self, phase: str, state: Object) -> None:
        status = {"state": state, "ready": "running" in state, "imageID": "", "restartCount": 0}
        statuses = [{"name": c["name"], "image": c["image"], **status} for c in self.containers]
        changes = {"status": {"phase": phase, "containerStatuses": statuses}}
        self.server.patch("pods", self.name, changes)

    def _condition(self, kind: str, status: str, reason: str, message: str) -> None:
        found = self.server.get("pods", self.name)["status"].get("conditions", [])
        made = {"type": kind, "status": status, "reason": reason, "message": message}
        made["lastTransitionTime"] = self._now()
        conditions = [*(c for c in found if c["type"] != kind), made]
        self.server.patch("pods", self.name, {"status": {"conditions": conditions}})


def _require_manager(resource: str, body: Object) -> None:
    """Refuse what Trainer's webhook refuses: a patch of a manager without a domain."""
    for patch in body["spec"].get("runtimePatches", []) if resource == TRAINJOBS else []:
        if not re.fullmatch(r"[a-z0-9.-]+/[\w./-]+", manager := patch["manager"]):
            message = (
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
                f"spec.runtimePatches.manager: Invalid value: {manager}: must be a domain-prefixed "
                'path (such as "acme.io/foo")'
            )
            raise Refused(403, "Forbidden", message)


class Trainer(Controller):
    """Runs `script` in every pod of every TrainJob.

    Attributes:
        created: every TrainJob, as it was created.
        admits: whether jobs with a queue start at once; otherwise they stay suspended until
            `admit`.
        refusal: message of the Job's event if only `admitted` of its pods may be created; empty
            if all of them may.
        pods_made: number of pods created so far, over all TrainJobs.
    """

    def __init__(self, server: FakeKubernetes, script: Script) -> None:
        super().__init__(server)
        self.script, self.admits, self.refusal, self.admitted = script, True, "", 0
        self.created: list[Object] = []
        self._attempts: Counter[str] = Counter()
        self._pods: dict[str, Pod] = {}
        self._waiting: dict[str, Object] = {}  # deleted in the foreground
        self.pods_made = 0
        server.admissions.append(_require_manager)

    def handle(self, event: Event) -> None:
        metadata = event.object["metadata"]
        if event.key.resource == TRAINJOBS and event.type == "ADDED":
            self.created.append(event.object)
            self._attempts[metadata["labels"][WORK]] += 1
            if QUEUE in metadata["labels"] and not self.admits:
                self.server.patch(TRAINJOBS, event.key.name, {"spec": {"suspend": True}})
                self._set(event.key.name, "Suspended", "Suspended", "TrainJob is suspended")
            else:
                self._start(event.object)
        if event.key.resource == TRAINJOBS and FOREGROUND in metadata.get("finalizers", []):
            self._waiting[event.key.name] = event.object
        if COLLECTED in metadata.get("finalizers", []) and "deletionTimestamp" in metadata:
            threading.Timer(COLLECTION_SECONDS, self._collect, (event.key.name,)).start()
        if (event.key.resource, event.type) == (JOBSETS, "DELETED"):
            self._restart_deleted(event.key.name)
        if event.key.resource == "pods" and metadata["uid"] in self._pods:
            if "deletionTimestamp" in metadata:
                self._pods[metadata["uid"]].terminated.set()
            self._judge(event.object)

    def _restart_deleted(self, name: str) -> None:
        """Start the pods of a TrainJob again while it waits for its dependents to be deleted.

        Trainer 2.3 still reconciles such a TrainJob: all pods start once more, and end when garbage
        collection finds that their owner is gone.
        """
        if job := self._waiting.pop(name, None):
            self._start(job)

    def admit(self, name: str) -> None:
        """Resume a suspended job, as Kueue does when its queue has quota."""
        self._set(name, "Suspended", "Resumed", "TrainJob is resumed", "False")
        self._start(self.server.patch(TRAINJOBS, name, {"spec": {"suspend": False}}))

    def _start(self, job: Object) -> None:
        name = job["metadata"]["name"]
        if not self._snapshot(job):
            return self._set(name, "Failed", "ReachedMaxRestarts", REACHED.format(name))
        jobset = {"metadata": {"name": name, "ownerReferences": [_owner("TrainJob", job)]}}
        jobset = self.server.create(JOBSETS, jobset)
        nodes = job["spec"]["trainer"]["numNodes"]
        if self.refusal:
            self._refuse(name)
            nodes = self.admitted
        port = free_port()
        for node in range(nodes):
            made = self.server.create("pods", _pod(job, jobset, node, port))
            pod = Pod(self.server, made, node, self._attempts[job["metadata"]["labels"][WORK]])
            self._pods[made["metadata"]["uid"]] = pod
            self.pods_made += 1
            threading.Thread(target=self._play, args=(pod,), daemon=True).start()
        timer = threading.Timer(job["spec"]["activeDeadlineSeconds"], self._expire, (name,))
        timer.daemon = True
        timer.start()

    def _refuse(self, name: str) -> None:
        about = {"kind": "Job", "namespace": "lathe", "name": f"{name}-node-0"}
        event: Object = {"metadata": {"name": f"{name}-node-0.1"}, "involvedObject": about}
        event |= {"type": "Warning", "reason": "FailedCreate", "lastTimestamp": _now()}
        self.server.create("events", event | {"message": self.refusal})

    def _snapshot(self, job: Object) -> bool:
        """Create the snapshot of the job's runtime; False if that of an earlier job still exists.

        Trainer 2.3 stores the runtime in a ConfigMap, which is garbage-collected some time after
        the TrainJob. If an earlier one of the same name is still there, Trainer creates no JobSet,
        and the TrainJob gets the status of the earlier job.
        """
        metadata: Object = {
            "name": f"{job['metadata']['name']}-runtime-snapshot",
            "ownerReferences": [_owner("TrainJob", job)],
            "finalizers": [COLLECTED],
        }
        try:
            self.server.create("configmaps", {"metadata": metadata})
        except Refused:
            found = self.server.get("configmaps", metadata["name"])["metadata"]
            return bool(found["ownerReferences"][0]["uid"] == job["metadata"]["uid"])
        return True

    def _collect(self, name: str) -> None:
        with suppress(Refused):
            self.server.patch("configmaps", name, {"metadata": {"finalizers": []}})

    def _play(self, pod: Pod) -> None:
        with suppress(Refused):
            try:
                self.script(pod)
            except Refused:
                raise
            except Exception:  # the launcher would wait for the pod forever
                pod.say(*traceback.format_exc().splitlines())
                pod.end(1)
            finally:
                self.server.patch("pods", pod.name, {"metadata": {"finalizers": []}})

    def _judge(self, pod: Object) -> None:
        labels, phase = pod["metadata"]["labels"], pod["status"].get("phase")
        name = labels[JOBSET_NAME]
        if self.server.get(JOBSETS, name)["metadata"]["uid"] != labels[JOBSET_UID]:
            return  # the pod belongs to an earlier JobSet of that name
        if phase == "Failed":
            self._set(name, "Failed", "ReachedMaxRestarts", REACHED.format(name))
            self._end_pods(name)
        phases = [other["status"].get("phase") for other in self._job_pods(name)]
        if phase == "Succeeded" and set(phases) == {"Succeeded"}:
            self._set(name, "Complete", "AllJobsCompleted", "jobset completed successfully")

    def _expire(self, name: str) -> None:
        with suppress(Refused):
            message = "TrainJob exceeded its active deadline"
            self._set(name, "Failed", "DeadlineExceeded", message)
            self._end_pods(name)

    def _end_pods(self, name: str) -> None:
        for pod in self._job_pods(name):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                self.server.delete("pods", pod["metadata"]["name"])

    def _job_pods(self, name: str) -> list[Object]:
        uid = self.server.get(JOBSETS, name)["metadata"]["uid"]
        return self.server.list("pods", labels=f"{JOBSET_UID}={uid}")

    def _set(self, name: str, kind: str, reason: str, message: str, status: str = "True") -> None:
        made = {"type": kind, "status": status, "reason": reason, "message": message}
        made["lastTransitionTime"] = _now()
        found = self.server.get(TRAINJOBS, name).get("status", {}).get("conditions", [])
        if not any(c["type"] in ("Complete", "Failed") for c in found):
            conditions = [*(c for c in found if c["type"] != kind), made]
            self.server.patch(TRAINJOBS, name, {"status": {"conditions": conditions}})


def run_command(pod: Pod) -> None:
    """Run the container's command on this machine, with its environment and a temporary home.

    Deleting the pod sends SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="pod-") as home:
        _run_process(pod, home)


def _run_process(pod: Pod, home: str) -> None:
    given = {v["name"]: v["value"] if "value" in v else _value(pod, v) for v in _env(pod)}
    named = {name: value for name, value in given.items() if value is not None}
    names = "PATH", "PYTHONPATH", warm.CHILDREN
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    inherited |= {
        "KUBECONFIG": str(pod.server.kubeconfig(Path(home)))
    }  # in place of the service account's token
    command = [*pod.container["command"], *pod.container.get("args", [])]
    command = [*_on_this_machine(command[0]), *command[1:]]
    pod.start()
    with subprocess.Popen(
        command,
        env=inherited | named | {"HOME": home, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        threading.Thread(target=_terminate_with_pod, args=(pod, process), daemon=True).start()
        for line in process.stdout:
            pod.say(line.rstrip("\n"))
    pod.end(process.returncode if process.returncode >= 0 else 128 - process.returncode)
    pod.terminated.set()


def _on_this_machine(program: str) -> list[str]:
    """This machine's equivalent of a program in the images."""
    if program == "/opt/paddle/python":
        return [str(find_python())]
    if program == "python":
        return warm.python()
    return [*warm.python(), "-m", program]


def _terminate_with_pod(pod: Pod, process: "subprocess.Popen[str]") -> None:
    pod.terminated.wait()
    process.terminate()


def _env(pod: Pod) -> list[Object]:
    return list(pod.container["env"])


def _value(pod: Pod, variable: Object) -> str | None:
    """Resolve a variable's `valueFrom`: a Secret, a ConfigMap, or a field of the pod.

    A missing label is an empty string, and a missing optional key is None.
    """
    ((kind, reference),) = variable["valueFrom"].items()
    if kind == "fieldRef":
        metadata = {"name": pod.name, "uid": pod.uid, "namespace": "lathe"}
        return str(metadata.get(reference["fieldPath"].removeprefix("metadata."), ""))
    is_secret = kind == "secretKeyRef"
    resource = "secrets" if is_secret else "configmaps"
    data = pod.server.get(resource, reference["name"])["data"]
    if reference.get("optional") and reference["key"] not in data:
        return None
    text = data[reference["key"]]
    return base64.b64decode(text).decode() if is_secret else str(text)


def _pod(job: Object, jobset: Object, node: int, port: int) -> Object:
    """A pod as JobSet 0.11 and Job create it from the runtime's container and the job's patch."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    patched = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    template = patched["replicatedJobs"][0]["template"]["spec"]["template"]
    torch = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    env = trainer["env"] + [{"name": name, "value": value} for name, value in torch.items()]
    container: dict[str, Any] = {"name": "node", "image": trainer["image"], "env": env}
    runtime = job["spec"]["runtimeRef"]["name"].removeprefix("lathe-")
    container |= {"command": _command(runtime), "args": trainer["args"]}
    container["resources"] = trainer["resourcesPerNode"]
    index = {"batch.kubernetes.io/job-completion-index": str(node)}
    labels = {
        **template["metadata"]["labels"],
        **index,
        "batch.kubernetes.io/job-name": f"{name}-node-0",
        JOBSET_NAME: name,
        JOBSET_UID: jobset["metadata"]["uid"],
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "jobset.sigs.k8s.io/job-index": "0",
        "jobset.sigs.k8s.io/restart-attempt": "0",
    }
    metadata = {
        "generateName": f"{name}-node-0-{node}-",
        "labels": labels,
        "annotations": index,
        "finalizers": [KUBELET],
        "ownerReferences": [_owner("JobSet", jobset)],
    }
    return {
        "metadata": metadata,
        "spec": {**template["spec"], "containers": [container]},
        "status": {"phase": "Pending"},
    }


@cache
def _command(runtime: str) -> list[str]:
    """Command of the container in the runtime's manifest."""
    made = yaml.safe_load((RUNTIMES / f"{runtime}.yaml").read_text())
    (job,) = made["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return list(container["command"])


def _owner(kind: str, owner: Object) -> Object:
    names = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {"apiVersion": "v1", "kind": kind, "controller": True, **names}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
