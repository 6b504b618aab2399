"""Logs to MLflow: one run per pipeline run and, below it, one per step. MLflow's own variables
configure it:

MLFLOW_TRACKING_URI, and MLFLOW_EXPERIMENT_NAME (`lathe` unless set).

Raises:
    ModuleNotFoundError: mlflow-skinny is not installed.
    MlflowException, OSError: the server or its artifact store failed.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
RUN, STEP, PARENT = "lathe.run", "lathe.step", "mlflow.parentRunId"
DEFAULTS = {
    # MLflow's own would hold a step for minutes where no server answers.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

PARAMETERS_AT_ONCE, METRICS_AT_ONCE = 100, 1000  # as MLflow's API allows
UNNAMEABLE = re.compile(r"[^\w.\- /]")  # what a metric's name may not have, such as a file name's (
POINTS = 1000
"""Maximum number of points per curve."""

CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "eval_loss", "eval_perplexity")


@dataclass(frozen=True)
class Task:
    """A step of a pipeline's run; `pipeline` and `run` make up the name of the run."""

    pipeline: str
    run: str
    step: str


class TrackedStep:
    """The run of one step. Its figures are also logged to the pipeline's run, as `STEP.NAME`."""

    def __init__(self, client: Any, task: Task, parent: str, run: str) -> None:
        self._client, self._task, self._parent, self._run = client, task, parent, run

    def figures(self, values: Mapping[str, float]) -> None:
        """Log metrics."""
        self._log(self._run, [(name, value, 0) for name, value in values.items()])
        step = self._task.step
        self._log(self._parent, [(f"{step}.{name}", value, 0) for name, value in values.items()])

    def curves(self, trace: Path) -> None:
        """Log the curves of a training's `train.jsonl`, downsampled to `POINTS` each."""
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        for name in CURVES:
            points = [(f"train.{name}", row[name], row["step"]) for row in lines if name in row]
            # Every stride-th point, and always the last one, which a reader looks for.
            stride = math.ceil(len(points) / POINTS) or 1
            self._log(self._run, [*points[:-1:stride], *points[-1:]])

    def file(self, path: Path) -> None:
        """Log a file as an artifact."""
        self._client.log_artifact(self._run, str(path))

    def end(self, status: str) -> None:
        """End the run with FINISHED or FAILED; the pipeline's run gets the status of the step that
        ended last."""
        for run in (self._run, self._parent):
            self._client.set_terminated(run, status)

    def _log(self, run: str, points: list[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [
            Metric(UNNAMEABLE.sub("_", name), *(value, now, step)) for name, value, step in points
        ]
        for some in _batches(metrics, METRICS_AT_ONCE):
            self._client.log_batch(run, metrics=some)


def open_step(task: Task, parameters: Mapping[str, object]) -> TrackedStep:
    """Start the run of a step, or continue it if the step is retried."""
    for variable, default in DEFAULTS.items():
        os.environ.setdefault(variable, default)
    from mlflow import MlflowClient
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    name = os.environ.get(EXPERIMENT) or "lathe"
    for _ in range(2):  # another step may create it at the same moment
        if existing := client.get_experiment_by_name(name):
            experiment = str(existing.experiment_id)
            break
        try:
            experiment = str(client.create_experiment(name))
            break
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    else:
        raise RuntimeError(f"the experiment {name} does not exist and cannot be created")
    tags = {RUN: task.run}
    parent = _run(client, experiment, tags, f"{task.pipeline} {task.run}")
    tags = {PARENT: parent, STEP: task.step}
    run = _run(client, experiment, tags, task.step)
    values = [Param(key, str(value)) for key, value in parameters.items()]
    for some in _batches(values, PARAMETERS_AT_ONCE):
        client.log_batch(run, params=some)
    return TrackedStep(client, task, parent, run)


def _run(client: Any, experiment: str, tags: dict[str, str], name: str) -> str:
    """The oldest run with these tags, set to running; created if there is none.

    Steps that start together may both create one: all use the oldest.
    """
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())

    def oldest() -> str | None:
        runs = client.search_runs(
            [experiment], query, order_by=["attributes.start_time ASC"], max_results=1
        )
        return runs[0].info.run_id if runs else None

    if (run := oldest()) is None:
        made = client.create_run(experiment, tags=tags, run_name=name).info.run_id
        run = oldest() or made
        if run != made:
            client.delete_run(made)
    client.update_run(run, status="RUNNING")
    return run


def _batches(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]
