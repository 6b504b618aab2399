"""Access to a cluster with Kubeflow for the scenarios: Lathe's commands and the Kubernetes API."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes import client as kubernetes
from kubernetes.stream import stream

from lathe_launch.cluster.api import Cluster
from pipelines.cluster.pods import CONTAINER, RUN, STAGE
from pipelines.cluster.server import connect

Command = Callable[[str, list[str]], str]
SECONDS = 1800.0
ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


def run_module(module: str, arguments: list[str]) -> str:
    """Run `python -m MODULE ARGUMENTS` and return its output; a failure fails the scenario."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Site:
    """The cluster, and the runs that the scenarios have started on it.

    Attributes:
        gpus: GPUs per node; 0 trains on CPUs.
        production: address of releases that may be replaced; if empty, production is not touched.
        ui: address of Pipelines' UI, whose forms are then filled in with a browser.
        command: function that runs one of Lathe's modules and returns its output.
        poll: seconds between two polls.
        runs: ids of the runs that the scenarios have started.
        trained, on_two_nodes: ids of the runs of `full` and on two nodes that have succeeded;
            empty before.
    """

    cluster: Cluster
    gpus: int = 0
    production: str = ""
    ui: str = ""
    command: Command = run_module
    poll: float = 2.0
    runs: list[str] = field(default_factory=list)
    trained: str = ""
    on_two_nodes: str = ""

    @property
    def core(self) -> Any:
        return kubernetes.CoreV1Api(self.cluster.api)

    def submit(self, pipeline: str, *arguments: str, nodes: int = 1) -> str:
        """Start a run and return its id."""
        machines = ["--gpus", str(self.gpus), "--nodes", str(nodes)]
        return self.started(
            self.command("pipelines.cluster.submit", [pipeline, *machines, *arguments])
        )

    def started(self, out: str) -> str:
        """Parse the id of the run that a command has started from its output."""
        found = re.search(r"^run (\S+): ", out, re.M)
        assert found, out
        self.runs.append(found[1])
        return found[1]

    def start(self, body: dict[str, Any]) -> str:
        """Start a run with a request as Pipelines' UI sends it and return its id."""
        self.runs.append(connect().runs.run_service_create_run(body).run_id)
        return self.runs[-1]

    def follow(self, run: str) -> str:
        """Follow a run until it succeeds; returns the output."""
        out = self.command("pipelines.cluster.follow", [run])
        assert out.endswith("the run has succeeded\n"), out
        return out

    def state(self, run: str) -> str:
        return str(connect().runs.run_service_get_run(run).state)

    def wait_for_end(self, run: str) -> str:
        """Wait for a run to end; returns its state."""
        self.until("the run ends", lambda: self.state(run) in ENDED, 900)
        return self.state(run)

    def terminate(self, run: str) -> None:
        connect().runs.run_service_terminate_run(run)

    def pods(self, labels: str, phase: str = "Running") -> list[Any]:
        return [pod for pod in self.cluster.pods(labels) if pod.status.phase == phase]

    def step(self, run: str, name: str) -> Any:
        """Wait for the running pod of a step."""
        labels = f"{RUN}={run},{STAGE}={name}"
        return self.until(f"step {name} runs", lambda: self.pods(labels), run=run)[0]

    def has_said(self, pod: str, words: str) -> bool:
        """Whether the log of a pod's main container contains a text."""
        read = self.core.read_namespaced_pod_log
        return words in read(pod, self.cluster.namespace, container=CONTAINER)

    def until(
        self, what: str, holds: Callable[[], Any], seconds: float = SECONDS, run: str = ""
    ) -> Any:
        """Poll `holds` until it returns a true value; fails if `run` ends before that."""
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
            assert not run or self.state(run) not in ENDED, f"{what}: the run is {self.state(run)}"
            time.sleep(self.poll)
        return found

    def execute(self, pod: str, script: str) -> str:
        """Run Python in a step's container."""
        command = ["python", "-c", script]
        # A new client: stream() changes its request method, which would affect other threads.
        own = kubernetes.CoreV1Api(kubernetes.ApiClient(self.cluster.api.configuration))
        connect_to = own.connect_get_namespaced_pod_exec
        return str(
            stream(
                connect_to, pod, self.cluster.namespace, container=CONTAINER, command=command,
                stdout=True, stderr=True,
            )
        )  # fmt: skip

    def left_behind(self) -> list[str]:
        """Names of TrainJobs and running pods of the runs started here, and of doctor pods."""
        jobs = [job["metadata"]["name"] for job in self.cluster.trainjobs()
                if job["metadata"]["labels"].get("lathe/run-id") in self.runs]  # fmt: skip
        pods = [pod for run in self.runs for pod in self.pods(f"{RUN}={run}")]
        doctors = self.cluster.pods(f"{STAGE}=doctor")
        return jobs + [pod.metadata.name for pod in [*pods, *doctors]]

    def end_everything(self) -> None:
        """Terminate all runs that have not ended."""
        for run in self.runs:
            if self.state(run) not in ENDED:
                self.terminate(run)


def skip_without(value: object, reason: str) -> None:
    if not value:
        pytest.skip(reason)


def whole_number(name: str) -> int:
    """Integer value of an environment variable; 0 if it is not set."""
    return int(os.environ.get(name) or 0)
