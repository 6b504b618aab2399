"""A Deployment controller for the fake Kubernetes API server, whose pods run a real program.

A pod runs a `Program`: a function that takes the release and returns once it is serving; if it
raises, the pod restarts it. A rollout creates all new pods first, and terminates the old ones when
the new ones are ready.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.support.fake_kubernetes import FakeKubernetes, Object

NAME = "lathe-serve"
LABELS = {"app.kubernetes.io/name": "lathe", "app.kubernetes.io/component": "serve"}
RESTART_SECONDS = 0.1


class Served(Protocol):
    """A server running in a pod that is ready."""

    def stop(self) -> None: ...


Program = Callable[[str], Served | None]


def deployment(release: str = "", replicas: int = 2, deadline_seconds: int = 600) -> Object:
    """The parts of the Deployment in manifests/ that matter for a rollout."""
    fetch = {"name": "LATHE_RELEASE", "value": release}
    containers = {
        "initContainers": [
            {
                "name": "fetch",
                "image": "lathe-serve",
                "command": [
                    "python",
                    "-m",
                    "lathe_base.storage",
                    "fetch",
                    "$(LATHE_RELEASE)",
                    "/models",
                ],
                "env": [{"name": "AWS_REGION", "value": "us-east-1"}, fetch],
            }
        ],
        "containers": [{"name": "triton", "image": "lathe-serve"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "labels": LABELS},
        "spec": {
            "replicas": replicas,
            "progressDeadlineSeconds": deadline_seconds,
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": containers},
        },
    }


@dataclass
class Pod:
    """A pod with one container, which a thread restarts whenever it fails."""

    name: str
    template: Object
    release: str
    served: Served | None = None
    ready: bool = False
    restarts: int = 0
    last_error: str = ""
    stopped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, program: Program, log: Callable[[str, str], None]) -> None:
        while not self.ended.is_set():
            try:
                self.served = program(self.release)
            except Exception as error:
                self.last_error = str(error).splitlines()[0]
                log(self.name, f"error: {self.last_error}")
                self.restarts += 1
                self.ended.wait(RESTART_SECONDS)
                continue
            self.ready = self.served is not None
            self.ended.wait()
        if self.served is not None:
            self.served.stop()
        self.stopped = True

    def to_object(self) -> Object:
        crash = {"exitCode": 1, "reason": "Error"}
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}} if self.restarts else {"running": {}}
        status = {
            "name": "triton",
            "image": "lathe-serve",
            "imageID": "",
            "ready": self.ready,
            "restartCount": self.restarts,
            "state": {"running": {}} if self.ready else waiting,
            "lastState": {"terminated": crash} if self.restarts else {},
        }
        not_ready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
        not_ready["message"] = "containers with unready status: [triton]"
        return {
            "metadata": {"name": self.name, **self.template["metadata"]},
            "status": {
                "phase": "Running",
                "conditions": [] if self.ready else [not_ready],
                "containerStatuses": [status],
            },
        }


class Deployments(threading.Thread):
    """Reconciles the pods of the only Deployment with its spec, until the server stops.

    Attributes:
        pods: current pods.
        made: all pods ever created.
        history: releases in the order in which their pods were created.
    """

    def __init__(self, server: FakeKubernetes, program: Program) -> None:
        super().__init__(daemon=True)
        self.server, self.program = server, program
        self.pods: list[Pod] = []
        self.made: list[Pod] = []
        self.history: list[str] = []
        self._written: dict[str, Object] = {}
        self._moved_at = time.monotonic()

    @property
    def ready(self) -> list[Pod]:
        """Pods that are serving and not being terminated."""
        return [pod for pod in self.pods if pod.ready]

    def run(self) -> None:
        while not self.server.stopped:
            for found in self.server.list("deployments.apps"):
                self._reconcile(found)
            time.sleep(0.05)
        for pod in self.pods:
            pod.ended.set()

    def _reconcile(self, found: Object) -> None:
        spec, template = found["spec"], found["spec"]["template"]
        current = [pod for pod in self.pods if pod.template == template]
        if not current:
            self._moved_at = time.monotonic()
        while len(current) < spec["replicas"]:
            current.append(self._make(template))
        complete = all(pod.ready for pod in current)
        for pod in [p for p in self.pods if p not in current and (complete or not p.ready)]:
            self.pods.remove(pod)
            self.server.delete("pods", pod.name)
            pod.ended.set()
        for pod in self.pods:
            written = pod.to_object()
            if self._written.get(pod.name) != written:
                self._written[pod.name] = written
                self.server.patch("pods", pod.name, written)
        late = time.monotonic() - self._moved_at > spec["progressDeadlineSeconds"]
        reason = "ProgressDeadlineExceeded" if late and not complete else "ReplicaSetUpdated"
        status = {
            "observedGeneration": found["metadata"]["generation"],
            "replicas": len(self.pods),
            "updatedReplicas": len(current),
            "availableReplicas": len(self.ready),
            "conditions": [{"type": "Progressing", "status": "True", "reason": reason}],
        }
        if found.get("status") != status:
            self.server.patch("deployments.apps", found["metadata"]["name"], {"status": status})

    def _make(self, template: Object) -> Pod:
        (release,) = (
            variable["value"]
            for container in template["spec"]["initContainers"]
            for variable in container["env"]
            if variable["name"] == "LATHE_RELEASE"
        )
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        pod = Pod(f"{NAME}-{digest}-{len(self.made)}", template, release)
        self.made.append(pod)
        self.pods.append(pod)
        self.history += [release] if self.history[-1:] != [release] else []
        self.server.create("pods", pod.to_object())
        threading.Thread(target=pod.run, args=(self.program, self.server.log), daemon=True).start()
        return pod


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met after {seconds} s"
        time.sleep(0.02)
