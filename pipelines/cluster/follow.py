"""Follows a run on the cluster: its steps, why they wait, their logs, and why it failed.

    python -m pipelines.cluster.follow RUN

attaches to any run, at any time.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import kfp_server_api
import typer
import urllib3
from tenacity import RetryCallState, retry, stop_after_delay, wait_exponential

from lathe.report.results import Results, usage_sentence
from lathe_base.errors import Code, StageError, UserError, coded
from lathe_launch.cluster.api import REJECTED_SECONDS
from lathe_launch.cluster.reasons import OOM
from pipelines.cluster.pods import Pods, Step, open_pods
from pipelines.cluster.results import ResultsReader, results_from_logs
from pipelines.cluster.server import HELP, Client, answers, connect, run_state
from pipelines.commands.arguments import error_messages, fail, wide_console
from pipelines.compiler.compile import STEPS
from pipelines.local.log import StageLog
from pipelines.steps.resources import SERVICE_ACCOUNT

WORDS = {
    "SUCCEEDED": "done in",
    "FAILED": "failed after",
    "SKIPPED": "skipped after",
    "CANCELED": "cancelled after",
}
ENDED = tuple(WORDS)
OUTCOMES = {"SUCCEEDED": "succeeded", "FAILED": "failed", "CANCELED": "been cancelled"}
GROUPS = (STEPS, "quantization", "measure", "search", "judge")
GROUP_PREFIXES = ("condition-", "exit-handler-", "for-loop-", "iteration-")
"""Name prefixes of sub-pipelines, which Pipelines lists among the steps."""
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.2, 5.0
PATIENCE_SECONDS = 600.0
"""Maximum time that the server may be unreachable before following stops; the run itself continues.
"""

UNCHECKED = re.compile(r"/tokenreviews\W+: ")
"""In a 401, with which Pipelines also answers if the Kubernetes API is away: it could not ask
whether the token is valid."""

AWAY = "code = Unavailable"
"""In the last words of a launcher or driver that could not reach Pipelines' API, which Pipelines
2.17 does not try again."""

UI_ACCOUNT = (
    f"in the form of the UI, type the service account {SERVICE_ACCOUNT}, or add the component "
    "default-account: docs/how-to/cluster-runs.md#runs-made-in-the-ui"
)

Logs = Annotated[bool, typer.Option("--logs/--no-logs", help="Stream the steps' logs.")]


def follow(client: Client, run_id: str, logs: bool = True) -> str:
    """Print the run's progress until it has ended, and if it failed, why.

    Args:
        logs: whether to print the log of a step while it runs.

    Returns:
        the run's last state, one of `ENDED`; CANCELED for a run that was terminated.

    Raises:
        ApiException, urllib3's HTTPError: the server has not answered for `PATIENCE_SECONDS`.
    """
    screen = threading.Lock()

    def show(line: str) -> None:
        with screen:
            print(line, flush=True)

    pods_or_reason = open_pods(
        run_id, client.steps_namespace, (lambda line: show(f"    {line}")) if logs else None
    )
    pods = pods_or_reason if isinstance(pods_or_reason, Pods) else None
    if pods is None:
        show(f"no logs, and no steps after a condition: {pods_or_reason}")
    progress = Progress()
    wait = FIRST_WAIT_SECONDS  # longer while nothing changes
    while True:
        run = _get_run(client, run_id)
        # The steps of pods, which know more; those without a pod, which came from the cache, are
        # those of Pipelines' tasks. A step in a loop is one task, and `tokenize 2` among the pods.
        by_name = {step.name: step for step in list_steps(run)}
        if pods:
            with suppress(UserError, StageError):  # which pass, as the run's own answer does
                pod_steps = {step.name: step for step in pods.steps()}
                for looped in {name.partition(" ")[0] for name in pod_steps if " " in name}:
                    by_name.pop(looped, None)
                by_name |= pod_steps
        steps = list(by_name.values())
        for line in progress.feed(steps):
            show(line)
            wait = FIRST_WAIT_SECONDS
        if run.state in ENDED:
            break
        time.sleep(wait)
        wait = min(wait * 1.5, MAX_WAIT_SECONDS)
    state = run_state(run)
    if state == "FAILED":
        for line in explain_failure(client, run, steps, pods):
            show(line)
    return state


def explain_failure(
    client: Client, run: Any, steps: list[Step], pods: Pods | None
) -> Iterator[str]:
    """The failed steps' error messages and last log lines."""
    if run.error and run.error.message:
        yield coded(StageError(run.error.message, Code.FAILED))
    failed = [step for step in steps if step.state == "FAILED"]
    # If no step has failed, its pod could not be made, or its driver has failed.
    said = pods.workflow_errors() if pods and not failed else []
    yield from (coded(StageError(text, Code.FAILED)) for text in said)
    if any("service account" in text or "forbidden" in text for text in said):
        yield f"  hint: {UI_ACCOUNT}"
    elif any(AWAY in text for text in said):
        yield f"  hint: {_resume_hint(run)}"
    namespace = client.steps_namespace
    for step in failed:
        if pods and step.pod:
            error, tail = pods.error(step)
            if step.why and not tail:  # its pod ended before it could say anything
                code = Code.OUT_OF_MEMORY if OOM in step.why else Code.FAILED
                error = StageError(f"{step.name}: {step.why}", code)
            if tail:
                yield f"last lines of {step.name}:"
                yield from (f"    {line}" for line in tail)
            yield coded(error)
            if OOM in step.why:
                yield f"  hint: make resume RUN={run.run_id} proposes how much more memory to give"
            elif AWAY in str(error):
                yield f"  hint: {_resume_hint(run)}"
            yield f"the whole log: kubectl -n {namespace} logs {step.pod} -c main"
            continue
        # Without access to the pods, Pipelines' own server may have the log.
        for pod in _pods_below(run, step):
            if log := _read_log(client, run.run_id, pod):
                words = StageLog()
                words.failed = step.name
                for line in log.splitlines():
                    deque(words.feed(line), maxlen=0)  # what it would print is not of interest
                yield coded(words.error())
                break
        else:  # no log could be read: say how
            pods_of_step = f"-l pipeline/runid={run.run_id},lathe/stage={step.name} -c main"
            log = f"{step.name}: its log: kubectl -n {namespace} logs {pods_of_step}"
            yield coded(StageError(log, Code.FAILED))


def _resume_hint(run: Any) -> str:
    return (
        f"Pipelines' API was away: make resume RUN={run.run_id} takes what the steps have stored; "
        "to retry such steps: docs/how-to/cluster-runs.md#resume-a-failed-run"
    )


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
                _preload_content=False, _return_http_data_only=True,
            )  # fmt: skip
        except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError):
            continue
        # HTML is a page of the UI, which has no such path.
        if "html" not in response.headers.get("Content-Type", ""):
            return str(response.data.decode(errors="replace"))
    return ""


class Progress:
    """Turns the state of a run's steps into lines about what has changed."""

    def __init__(self) -> None:
        self._told: dict[str, Step] = {}

    def feed(self, steps: list[Step]) -> Iterator[str]:
        """Yield a line for every step that waits, started, was retried or ended since the last
        call."""
        for step in sorted(steps, key=lambda step: step.begun or datetime.max.replace(tzinfo=UTC)):
            before = self._told.get(step.name)
            if before == step:
                continue
            self._told[step.name] = step
            if step.state == "PENDING":
                if step.why and (before is None or before.why != step.why):
                    yield f"{_clock(datetime.now(UTC))}  {step.name} waits: {step.why}"
                continue
            # One poll may see several changes: a step that is new here may have ended already.
            if before is None or before.state == "PENDING":
                yield f"{_clock(step.begun)}  {step.name}"
            elif before.attempt != step.attempt:
                lost = before.why or "its pod was lost"
                yield f"{_clock(step.begun)}  {step.name}, attempt {step.attempt + 1}: {lost}"
            if step.state in ENDED and (before is None or before.state != step.state):
                took = "a moment"
                if step.begun and step.ended:
                    took = f"{(step.ended - step.begun).total_seconds():.0f} s"
                yield f"{_clock(step.ended)}  {step.name}: {WORDS[step.state]} {took}"


def list_steps(run: Any) -> list[Step]:
    """The steps as Pipelines lists them.

    It lists each several times: `name-driver`, `name`, which holds its attempts, and every attempt
    `name(0)`, with `executor` and `executor(0)` below it.
    """
    details = (run.run_details and run.run_details.task_details) or []
    names = {task.display_name for task in details}
    return [
        Step(
            name=task.display_name,
            state=task.state or "PENDING",
            begun=_time(task.start_time),
            ended=_time(task.end_time),
        )
        for task in details
        if task.display_name and f"{task.display_name}-driver" in names
        if task.display_name not in ("root", *GROUPS)
        if not task.display_name.startswith(GROUP_PREFIXES)
    ]


def _time(time: datetime | None) -> datetime | None:
    """A time; None for Go's zero time, which is in the year 1."""
    return time if time and time.year > 1 else None


def _clock(time: datetime | None) -> str:
    return f"{(time or datetime.now(UTC)).astimezone():%H:%M:%S}"


def _tell_once(state: RetryCallState) -> None:
    if state.attempt_number == 1:
        print(f"{_clock(None)}  Pipelines does not answer; the run continues, retrying", flush=True)


def _again(state: RetryCallState) -> bool:
    """Whether to retry; the token was accepted before, and may be renewed in its file."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, kfp_server_api.ApiException):
        if error.status == 401:
            is_early = (state.seconds_since_start or 0.0) < REJECTED_SECONDS
            return is_early or bool(UNCHECKED.search(str(error.body)))
        return error.status in (429, 500, 502, 503, 504)
    return isinstance(error, urllib3.exceptions.HTTPError)


@retry(
    retry=_again,
    stop=stop_after_delay(PATIENCE_SECONDS),
    wait=wait_exponential(multiplier=FIRST_WAIT_SECONDS, max=MAX_WAIT_SECONDS),
    before_sleep=_tell_once,
    reraise=True,
)
def _get_run(client: Client, run_id: str) -> Any:
    return client.runs.run_service_get_run(run_id)


def follow_to_end(client: Client, run_id: str, logs: bool) -> None:
    """Follow a run, and end the process with its status: 1 if it failed or was cancelled."""
    page = client.page(f"runs/details/{run_id}")
    try:
        with answers():
            state = follow(client, run_id, logs)
    except KeyboardInterrupt:  # 130 is 128 + SIGINT, as in a shell
        fail(
            f"stopped following; the run continues: {page}\ncome back: make follow RUN={run_id}",
            130,
        )
    if state != "SUCCEEDED":
        what = f"the run has {OUTCOMES.get(state, state.lower())}: {page}"
        fail(coded(StageError(what, Code.FAILED)), StageError.status)
    show_results(client, run_id)
    print("the run has succeeded")


def show_results(client: Client, run_id: str) -> None:
    """Print a finished run's metrics, the gate's verdict and the report's address, or why they
    cannot be read from here."""
    missing = ""
    try:
        with answers():
            results = ResultsReader(client).read(_get_run(client, run_id))
    except (UserError, StageError) as error:
        missing = error.line if isinstance(error, UserError) else str(error)
        # The steps' logs have the metrics too, but neither verdict nor report.
        results, pods = Results(), open_pods(run_id, client.steps_namespace, None)
        if isinstance(pods, Pods):
            with suppress(UserError, StageError):
                results = results_from_logs(pods)
    if results == Results() and not missing:
        missing = "its steps recorded none, or Pipelines reused an earlier run's steps"
    if results.rows or results.best:
        wide_console().print(results.table())
    if results.verdict:
        print("\n".join([f"gate    {results.verdict}", *(f"    {r}" for r in results.reasons)]))
    if (trained := results.trained) and results.page == trained.page:  # without a report
        print(f"{trained}\nmodel   {trained.checkpoint}")
    if results.page:
        print(f"report  {results.page}\ndownload it: make report RUN={run_id}")
    if results.usage:
        print(f"used    {usage_sentence(results.usage)}")
    if missing:
        print(f"{'no report' if results.rows else 'no metrics'}: {missing}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
def main(
    run: Annotated[str, typer.Argument(help="Run id, as printed by `make submit`.")],
    logs: Logs = True,
) -> None:
    """Follow a run that was submitted, to its end."""
    with error_messages():
        client = connect()
        follow_to_end(client, run, logs)


if __name__ == "__main__":
    app()
