"""Follow a run on the cluster: tasks that start and end, and why a step failed."""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import kfp_server_api
import urllib3
from tenacity import retry, retry_if_exception, stop_after_delay, wait_exponential

from pipelines.log import StageLog
from pipelines.server import Client

WORDS = {
    "SUCCEEDED": "done in",
    "FAILED": "failed after",
    "SKIPPED": "skipped after",
    "CANCELED": "cancelled after",
}
ENDED = tuple(WORDS)
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 5.0
PATIENCE_SECONDS = 600.0
"""How long the server may be unreachable before following gives up; the run itself continues."""

RETRY = re.compile(r"\(\d+\)$")


def follow(client: Client, run_id: str, tasks: set[str]) -> str:
    """Print the run's progress until it has ended.

    Args:
        tasks: names of the pipeline's tasks; other entries of a run are KFP's own.

    Returns:
        the run's last state, one of `ENDED`.

    Raises:
        ApiException, urllib3's HTTPError: the server has not answered for `PATIENCE_SECONDS`.
    """
    progress = Progress(tasks)
    wait = FIRST_WAIT_SECONDS
    while True:
        run = _get_run(client, run_id)
        for line in progress.feed(_details(run)):
            print(line, flush=True)
            wait = FIRST_WAIT_SECONDS
        if run.state in ENDED:
            break
        time.sleep(wait)
        wait = min(wait * 1.5, LONGEST_WAIT_SECONDS)
    if run.state == "FAILED":
        for line in _explain(client, run, tasks):
            print(line, flush=True)
    return str(run.state)


class Progress:
    """Turns the server's list of a run's tasks into lines about what has changed."""

    def __init__(self, tasks: set[str]) -> None:
        self.tasks = tasks
        self._states: dict[str, str] = {}

    def feed(self, details: list[Any]) -> Iterator[str]:
        """Yield a line for every task that began or ended since the last call."""
        begun = [t for t in details if t.display_name in self.tasks and t.start_time]
        for task in sorted(begun, key=lambda t: t.start_time):
            if task.state in (None, "PENDING"):
                continue
            before = self._states.get(task.task_id)
            self._states[task.task_id] = task.state
            if before is None:
                yield f"{_clock(task.start_time)}  {task.display_name}"
            if before != task.state and task.state in ENDED:
                end = task.end_time or task.start_time
                took = (end - task.start_time).total_seconds()
                yield f"{_clock(end)}  {task.display_name}: {WORDS[task.state]} {took:.0f} s"


def _clock(time: datetime) -> str:
    return f"{time.astimezone():%H:%M:%S}"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, kfp_server_api.ApiException):
        return error.status in (429, 500, 502, 503, 504)
    return isinstance(error, urllib3.exceptions.HTTPError)


@retry(
    retry=retry_if_exception(_is_transient),
    stop=stop_after_delay(PATIENCE_SECONDS),
    wait=wait_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
    reraise=True,
)
def _get_run(client: Client, run_id: str) -> Any:
    return client.runs.run_service_get_run(run_id)


def _details(run: Any) -> list[Any]:
    """The step's name without the number of the attempt: `name(0)`, `name(1)` are one step."""
    details = (run.run_details and run.run_details.task_details) or []
    for task in details:
        task.display_name = RETRY.sub("", task.display_name or "")
    return details


def _explain(client: Client, run: Any, tasks: set[str]) -> Iterator[str]:
    """The failing steps' errors and last lines."""
    details = _details(run)
    failed = [task for task in details if task.state == "FAILED"]
    by_node = {_node(task.pod_name): task for task in details if task.pod_name}
    if run.error and run.error.message:
        yield f"error: {run.error.message}"
    for step in (task for task in failed if _step(task.display_name) in tasks):
        pods = list(_failing_pods(step, by_node))
        for task in [step, *pods]:
            if task.error and task.error.message:
                yield f"error: {step.display_name}: {task.error.message}"
        for pod in pods[-1:]:  # the last attempt
            log = _read_log(client, run.run_id, pod.pod_name)
            if log:
                yield f"error: {_last_words(step.display_name, log)}"
            namespace = client.namespace or "NAMESPACE"
            yield f"the whole log: kubectl -n {namespace} logs {pod.pod_name} -c main"


def _step(name: str) -> str:
    """Describe a failure, which may also happen in KFP's driver before the container starts."""
    return name.removesuffix("-driver")


def _node(name: str) -> str:
    """What identifies an Argo node: the children of a task are listed by node, `run-x-<hash>`,
    and a task itself by pod, `run-x-<template>-<hash>`."""
    return name.rpartition("-")[2]


def _failing_pods(task: Any, by_node: dict[str, Any]) -> Iterator[Any]:
    """The failed leaf nodes below a task, possibly itself."""
    nodes = [_node(child.pod_name) for child in task.child_tasks or [] if child.pod_name]
    below = [by_node[node] for node in nodes if node in by_node]
    below = [child for child in below if child.state == "FAILED"]
    if not below and task.pod_name:
        yield task
    for child in below:
        yield from _failing_pods(child, by_node)


def _read_log(client: Client, run_id: str, pod: str) -> str:
    """The pod's log: from the API server, or, where the UI is asked, from its own page."""
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


def _last_words(step: str, log: str) -> str:
    """The step's own error message, or else its last log lines."""
    words = StageLog()
    words.failed = step
    for line in log.splitlines():
        for _ in words.feed(line):
            pass
    return words.error()
