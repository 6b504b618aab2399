"""Lists the runs of the cluster, or what the steps of one have used, downloads a run's report, and
compares runs.

    python -m pipelines.cluster.runs list [--name RUN]
    python -m pipelines.cluster.runs report RUN
    python -m pipelines.cluster.runs compare RUN,RUN

A run is named by its id, or by its folder below run/ if it ran on this machine. If no cluster is
configured, `list` lists local runs.
"""

import os
import sys
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from lathe.report.results import Results, read_results, read_text, usage_columns, usage_table
from lathe.report.summary import columns
from lathe_base.artifacts.kinds import PAGE
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import atomic_file, claim_output_file
from lathe_launch.usage import Usage
from pipelines.cluster.follow import list_steps
from pipelines.cluster.pods import usage_by_run
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import (
    HELP,
    Client,
    answers,
    connect,
    find,
    is_configured,
    open_cluster,
    pages,
    run_state,
)
from pipelines.cluster.submit import EXPERIMENT
from pipelines.commands.arguments import error_messages, wide_console
from pipelines.commands.inputs import RUN_LOG
from pipelines.local.run import RUNS

REPORTS = Path("build/reports")
AT_A_TIME = 8
PODS_SECONDS = 5.0
PAGE_SIZE = 100
ABSENT = "-"
LIST_COLUMNS = 170
METRIC_COLUMNS = ("Perplexity", "File", "Decode per token")
"""Columns of the summary to list, for a run's last model."""


@dataclass(frozen=True)
class Run:
    """A run with its results.

    Attributes:
        seconds: duration; None before it has ended.
        parameters: the pipeline's arguments, with overrides as separate parameters; empty for local
            runs, which do not record them.
        missing: why the results could not be read.
        usage: what each step has used, as it has recorded, or else as its pods or Pipelines say.
    """

    id: str
    name: str
    state: str
    begun: datetime
    seconds: float | None
    parameters: dict[str, str]
    results: Results
    missing: str = ""
    usage: Mapping[str, Usage] = field(default_factory=dict)


def latest_runs(client: Client, limit: int) -> list[Run]:
    """The latest runs of the experiment `lathe`, newest first."""
    listing = client.experiments.experiment_service_list_experiments
    experiments = find(listing, "experiments", EXPERIMENT, namespace=client.namespace)
    if not experiments:
        return []
    reader, pods = ResultsReader(client), _usage_of_pods(client)
    listed = pages(
        client.runs.run_service_list_runs,
        "runs",
        experiment_id=experiments[0].experiment_id,
        sort_by="created_at desc",
        page_size=PAGE_SIZE,
    )
    runs = list(islice(listed, limit))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda run: _cluster_run(reader, run, pods), runs))


def _usage_of_pods(client: Client) -> dict[str, dict[str, Usage]]:
    """`usage_by_run`; nothing without access to the pods."""
    try:
        cluster = replace(open_cluster(client.steps_namespace), patience=PODS_SECONDS)
        return usage_by_run(cluster)
    except (UserError, StageError):
        return {}


def local_runs(limit: int) -> list[Run]:
    """The latest runs of this machine, newest first."""
    logs = sorted(RUNS.glob(f"*/{RUN_LOG}"), key=lambda path: -path.stat().st_mtime)
    return [local_run(log.parent) for log in logs[:limit]]


def local_run(folder: Path) -> Run:
    """A run of this machine."""
    written = datetime.fromtimestamp((folder / RUN_LOG).stat().st_mtime, UTC)
    results = read_results(str(folder))
    return Run(folder.name, folder.name, "", written, None, {}, results, usage=results.usage)


def find_run(name: str, client: Client | None = None) -> Run:
    """The run with this id, or in this folder below run/.

    Raises:
        UserError: there is no such run, or its results cannot be read.
    """
    folder = RUNS / name
    if name and folder.parent == RUNS and (folder / RUN_LOG).is_file():
        return local_run(folder)
    if not name:
        raise UserError(
            "no run is named",
            "give RUN=, an id or a name that `make runs` lists",
            Code.MISSING_OPTION,
        )
    client = client or connect()
    with answers():
        details = client.runs.run_service_get_run(name)
        run = _cluster_run(ResultsReader(client), details, _usage_of_pods(client))
    if run.missing:
        raise UserError(
            f"run {name}: {run.missing}", "see docs/how-to/cluster-runs.md#results", Code.NOT_FOUND
        )
    return run


def _cluster_run(reader: ResultsReader, run: Any, pods: Mapping[str, Mapping[str, Usage]]) -> Run:
    results, missing = Results(), ""
    try:
        results = reader.read(run)
    except UserError as error:
        missing = error.line
    except StageError as error:
        missing = str(error)
    # An override is a parameter of its own, and so is a setting of a recipe passed as its text.
    parameters = (run.runtime_config and run.runtime_config.parameters) or {}
    overrides = parameters.get("overrides") or []
    values = {key: str(value) for key, value in parameters.items() if key != "overrides"}
    for key in [key for key, value in values.items() if "\n" in value]:
        values |= _recipe_settings(key, values.pop(key))
    # A step that failed has recorded nothing; its pods know more than Pipelines does.
    failed = {step.name: step for step in list_steps(run) if step.state == "FAILED"}
    seconds = {
        name: (step.ended - step.begun).total_seconds()
        for name, step in failed.items()
        if step.begun and step.ended
    }
    failures = {name: Usage(hours=s / 3600) for name, s in seconds.items()}
    of_pods = pods.get(run.run_id, {})  # at first for the order in which steps began
    usage = {**of_pods, **failures, **of_pods, **results.usage}
    # The zero time stands for a run that has not ended.
    ended = run.finished_at if run.finished_at and run.finished_at.year > 1970 else None
    return Run(
        run.run_id,
        run.display_name,
        run_state(run),
        run.created_at,
        (ended - run.created_at).total_seconds() if ended else None,
        values | dict(override.partition("=")[::2] for override in overrides),
        results,
        missing,
        usage,
    )


def _recipe_settings(key: str, text: str) -> dict[str, str]:
    """The settings of a recipe that was passed as its text, as parameters of their own."""

    def flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for inner, one in value.items():
                yield from flat(one, f"{name}.{inner}" if name else str(inner))
        else:
            yield name, str(value)

    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError:
        settings = None
    return dict(flat(settings, "")) if isinstance(settings, dict) else {key: text}


def runs_table(runs: list[Run]) -> Table:
    """A table with one line per run: name, state, the metrics of its last model, and what its steps
    have used; columns of usage that no run has are omitted."""
    totals = {str(i): sum(run.usage.values(), Usage()) for i, run in enumerate(runs)}
    used = {title: cells for title, cells in usage_columns(totals) if title != "took"}
    table = Table("run", "name", "state", "begun", "took", "gate", "model", *METRIC_COLUMNS, *used)
    for column in table.columns:
        column.no_wrap = True
    for i, run in enumerate(runs):
        took = "" if run.seconds is None else str(timedelta(seconds=int(run.seconds)))
        begun = f"{run.begun.astimezone():%Y-%m-%d %H:%M}"
        verdict = run.results.verdict or ABSENT
        model = [ABSENT] * (1 + len(METRIC_COLUMNS))
        if rows := run.results.rows:
            # The last model, with ratios to the first.
            cells = {column.title: column.cell(rows[-1], rows[0]) for column in columns(rows)}
            model = [rows[-1].name] + [
                f"{cell.value} {cell.ratio}".strip() if (cell := cells.get(title)) else ABSENT
                for title in METRIC_COLUMNS
            ]
        usage = [shares[i] for shares in used.values()]
        table.add_row(run.id, run.name, run.state, begun, took, verdict, *model, *usage)
    return table


def comparison_table(
    titles: Sequence[str],
    parameters: Sequence[Mapping[str, str]],
    results: Sequence[Results],
    usage: Sequence[Mapping[str, Usage]] = (),
) -> Table:
    """One column per run.

    Args:
        titles: of the columns.
        parameters: arguments of each run; omitted ones have the pipeline's defaults.
        results: recorded results of each run.
        usage: what the steps of each run have used.
    """
    table = Table("", *titles)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for run_parameters in parameters for name in run_parameters):
        values = [run_parameters.get(name, ABSENT) for run_parameters in parameters]
        if len(set(values)) > 1:
            table.add_row(name, *values)
    table.add_section()
    if any(result.verdict for result in results):
        table.add_row("gate", *(result.verdict or ABSENT for result in results))
    # Models of the same name beside each other, with ratios to the first run that has one.
    for name in dict.fromkeys(row.name for result in results for row in result.rows):
        models = [
            next((row for row in result.rows if row.name == name), None) for result in results
        ]
        known = [model for model in models if model]
        for metric in columns(known):
            figures = [str(metric.cell(m, known[0])) if m else ABSENT for m in models]
            table.add_row(f"{name}: {metric.title}", *figures)
    best = [result.best or {} for result in results]
    for name in dict.fromkeys(name for metrics in best for name in metrics):
        figures = [f"{metrics[name]:.4g}" if name in metrics else ABSENT for metrics in best]
        table.add_row(f"chosen: {name}", *figures)
    table.add_section()
    for step in dict.fromkeys(step for steps in usage for step in steps):
        used = {str(i): steps.get(step, Usage()) for i, steps in enumerate(usage)}
        for title, cells in usage_columns(used):
            table.add_row(f"{step}: {title}", *cells[:-1])  # without their sum
    return table


def fetch_report(run: Run, output: Path) -> None:
    """Write the run's HTML report to a file.

    Raises:
        UserError: the run has none; or `output` exists but is not a report.
    """
    if not run.results.page:
        raise UserError(
            f"run {run.id}: has no report",
            "the run has not reached that step, or Pipelines reused an earlier run's outputs",
            Code.NOT_FOUND,
        )
    claim_output_file(output, PAGE)
    text = read_text(run.results.page)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(output) as work:
        work.write_text(text, encoding="utf-8")


def has_display() -> bool:
    """Whether a browser could show a page."""
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, epilog=HELP)


@app.command("list", epilog=HELP)
def list_command(
    limit: Annotated[int, typer.Option(min=1, help="Number of runs to list, latest first.")] = 20,
    name: Annotated[str, typer.Option(help="Id or name: show what its steps have used.")] = "",
) -> None:
    """List the latest runs with their metrics, or what the steps of one have used."""
    if name:
        with error_messages():
            usage = find_run(name).usage
        if not usage:
            print("no step of this run has recorded what it has used")
            return
        wide_console().print(usage_table(usage))
        return
    with error_messages(), answers():
        runs = latest_runs(connect(), limit) if is_configured() else local_runs(limit)
    if not runs:
        print("no runs yet" if is_configured() else f"no runs yet in {RUNS}/")
        return
    # Ids and names are copied from here: no width of a terminal, or of a pipe, cuts them.
    table = runs_table(runs)
    needed = Console(width=10_000).measure(table).maximum
    wide_console(max(LIST_COLUMNS, needed)).print(table)
    for missing in dict.fromkeys(run.missing for run in runs if run.missing):
        print(f"no metrics: {missing}")


@app.command("report", epilog=HELP)
def report_command(
    run: Annotated[str, typer.Argument(help="The run.")],
    output: Annotated[str, typer.Option(help="File; default: build/reports/<run>.html.")] = "",
    is_opened: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in a browser, if there is one.")
    ] = True,
) -> None:
    """Download the HTML report of a run."""
    with error_messages():
        run_details = find_run(run)
        path = Path(output or REPORTS / f"{run_details.id}.html")
        fetch_report(run_details, path)
    print(path)
    if is_opened and has_display():
        webbrowser.open(path.absolute().as_uri())


@app.command("compare", epilog=HELP)
def compare_command(
    runs: Annotated[str, typer.Argument(help="Two or more runs: a,b,c.")],
) -> None:
    """Compare runs: parameters that differ, and metrics."""
    with error_messages():
        names = [name.strip() for name in runs.split(",") if name.strip()]
        if len(names) < 2:
            raise UserError(
                f"compare {runs!r}: at least two runs are required",
                "give RUN=a,b",
                Code.MISSING_OPTION,
            )
        details = [find_run(name) for name in names]
    wide_console(LIST_COLUMNS).print(
        comparison_table(
            [f"{run.name}\n{run.id[:8]}" for run in details],
            [run.parameters for run in details],
            [run.results for run in details],
            [run.usage for run in details],
        )
    )


if __name__ == "__main__":
    app()
