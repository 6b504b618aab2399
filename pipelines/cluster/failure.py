"""Explains why a run on the cluster failed, from the logs of its failed steps."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import kfp_server_api
import urllib3

from pipelines.cluster.pods import Pods, Step
from pipelines.cluster.server import Client
from pipelines.local.log import StageLog


def explain_failure(
    client: Client, run: Any, steps: list[Step], pods: Pods | None
) -> Iterator[str]:
    """The failed steps' error messages and last log lines."""
    if run.error and run.error.message:
        yield f"error: {run.error.message}"
    namespace = client.steps_namespace
    for step in (step for step in steps if step.state == "FAILED"):
        if pods and step.pod:
            message, tail = pods.error(step)
            if step.why and not tail:  # its pod ended before it could say anything
                message = f"{step.name}: {step.why}"
            if tail:
                yield f"last lines of {step.name}:"
                yield from (f"    {line}" for line in tail)
            yield f"error: {message}"
            yield f"the whole log: kubectl -n {namespace} logs {step.pod} -c main"
            continue
        for pod in _pods_below(run, step):
            if log := _read_log(client, run.run_id, pod):
                words = StageLog()
                words.failed = step.name
                for line in log.splitlines():
                    deque(words.feed(line), maxlen=0)  # what it would print is not of interest
                yield f"error: {words.error()}"
                break
        else:
            pods_of_step = f"-l pipeline/runid={run.run_id},lathe/stage={step.name} -c main"
            yield f"error: {step.name}: its log: kubectl -n {namespace} logs {pods_of_step}"


def _pods_below(run: Any, step: Step) -> list[str]:
    """The nodes of a step's failed attempts, the last first, as far as they are listed."""
    details = run.run_details.task_details
    by_pod = {task.pod_name.rpartition("-")[2]: task for task in details if task.pod_name}
    names: list[str] = []

    def descend(task: Any) -> None:
        children = [child.pod_name for child in task.child_tasks or [] if child.pod_name]
        below = [
            by_pod[name.rpartition("-")[2]]
            for name in children
            if name.rpartition("-")[2] in by_pod
        ]
        for child in below:
            descend(child)
        if not below:
            names.extend(filter(None, [task.pod_name, *children]))

    for task in details:
        if task.display_name == step.name:
            descend(task)
    return list(reversed(dict.fromkeys(names)))


def _read_log(client: Client, run_id: str, pod: str) -> str:
    """The pod's log: from the API server or, if the endpoint is the UI, from its own page."""
    query = [("podname", pod), ("runid", run_id), ("podnamespace", client.namespace or "")]
    for path, parameters in (
        (f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log", []),
        ("/k8s/pod/logs", query),
    ):
        try:
            response = client.runs.api_client.call_api(
                path, "GET", query_params=parameters, auth_settings=["Bearer"],
                _preload_content=False, _return_http_data_only=True, _request_timeout=30,
            )  # fmt: skip
        except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError):
            continue
        if "html" not in response.headers.get("Content-Type", ""):
            return str(response.data.decode(errors="replace"))
    return ""
