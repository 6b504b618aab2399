"""Runs a pipeline on the cluster periodically, at the times of a cron expression.

python -m pipelines.cluster.schedule set full --cron "0 0 3 * * 1"
python -m pipelines.cluster.schedule remove full

Kubeflow's cron expressions have six fields, starting with seconds. The parser is our own because it
has to accept exactly what Kubeflow's scheduler does: croniter also accepts `L`, `W` and `#`, which
that scheduler does not know.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any

import typer
from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster.api import WORKFLOWS, Cluster
from pipelines.cluster.follow import ENDED
from pipelines.cluster.server import HELP, Client, answers, connect, find, pages
from pipelines.cluster.submit import Root, Strict, Submission, Tried, prepare
from pipelines.commands.arguments import Pipeline, error_messages, takes_arguments, takes_machines

PAGE = 100
SCHEDULED = ("kubeflow.org", "v1beta1", "scheduledworkflows")
POLL_SECONDS = 2.0
END_SECONDS = 600.0
PIPELINES_IMAGE = re.compile(r"[\w./:-]*kfp-(?:launcher|driver)[:@][\w.:-]+")
OWNER = "scheduledworkflows.kubeflow.org/scheduledWorkflowName"
"""Label of the workflows that a schedule has created."""
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
FIELDS: list[tuple[str, int, int, list[str]]] = [
    ("second", 0, 59, []),
    ("minute", 0, 59, []),
    ("hour", 0, 23, []),
    ("day of month", 1, 31, []),
    ("month", 1, 12, MONTHS),
    ("day of week", 0, 6, WEEKDAYS),
]
CRON_HINT = (
    'write "SECOND MINUTE HOUR DAY-OF-MONTH MONTH DAY-OF-WEEK": '
    '"0 0 3 * * 1" is Mondays at 03:00:00'
)
MAX_TIME_TO_MATCH = timedelta(days=8 * 366)
"""Maximum time to the next match: February 29th may be eight years away."""


def set_schedule(submission: Submission, name: str, cron: str) -> int:
    """Create the recurring run `name`, replacing those with the same name; two are never active.
    One whose run has not ended stays, disabled, until the next `set` or `remove`, because deleting
    it would delete the run's workflow.

    Returns:
        the number of recurring runs that it replaced.
    """
    client = submission.client
    # The old ones stop first: at no time may two start runs.
    old = schedules(client, name)
    with _disabled(client, old):
        models = client.api_models
        client.recurring_runs.recurring_run_service_create_recurring_run(
            models.V2beta1RecurringRun(
                display_name=name,
                mode=models.RecurringRunMode.ENABLE,
                trigger=models.V2beta1Trigger(cron_schedule=models.V2beta1CronSchedule(cron=cron)),
                no_catchup=True,  # no runs for times that it has missed
                max_concurrency="1",
                namespace=client.namespace,
                **submission.request(),
            )
        )
    busy = {run.recurring_run_id for run in unfinished(client, old)}
    remove(client, [schedule for schedule in old if schedule.recurring_run_id not in busy])
    return len(old)


def schedules(client: Client, name: str) -> list[Any]:
    """The recurring runs with this name."""
    listing = client.recurring_runs.recurring_run_service_list_recurring_runs
    return find(listing, "recurring_runs", name, namespace=client.namespace)


def unfinished(client: Client, listed: list[Any]) -> list[Any]:
    """The unfinished runs of these recurring runs."""
    schedules = {schedule.recurring_run_id for schedule in listed}
    if not schedules:
        return []
    request = client.runs.run_service_list_runs
    runs = pages(request, "runs", namespace=client.namespace, page_size=PAGE)
    return [run for run in runs if run.recurring_run_id in schedules and run.state not in ENDED]


def remove(client: Client, listed: list[Any]) -> None:
    """Delete recurring runs without unfinished runs: Pipelines deletes a run's workflow with its
    recurring run, and the run would stay RUNNING forever."""
    for schedule in listed:
        client.recurring_runs.recurring_run_service_delete_recurring_run(schedule.recurring_run_id)


def end_runs(client: Client, listed: list[Any], wait: bool) -> None:
    """Terminate the runs of disabled recurring runs, or only wait for them if `wait`.

    Raises:
        StageError: a terminated run has not ended after `END_SECONDS`.
    """
    reported: dict[str, str] = {}
    began = time.monotonic()
    while runs := unfinished(client, listed):
        for run in runs:
            if run.run_id not in reported:
                reported[run.run_id] = run.display_name
                if not wait:
                    client.runs.run_service_terminate_run(run.run_id)
                page = client.page(f"runs/details/{run.run_id}")
                what = "waiting for" if wait else "terminating"
                print(f"{what} {run.display_name}: {page}", flush=True)
        if not wait and time.monotonic() - began > END_SECONDS:
            raise StageError(
                f"{', '.join(reported.values())}: terminated, but still running after "
                f"{END_SECONDS:.0f} "
                "s: the schedule was not changed, try again later",
                Code.TIMEOUT,
            )
        time.sleep(POLL_SECONDS)


def stale_schedules(cluster: Cluster) -> str:
    """Check that schedules run the launcher and driver that Pipelines gives to new runs: each keeps
    those of the Pipelines version that created it.

    Raises:
        UserError: some do not, or they may not be listed.
    """
    listing = kubernetes.CustomObjectsApi(cluster.api).list_namespaced_custom_object
    objects: dict[str, list[Any]] = {}
    for group, version, plural in (WORKFLOWS, SCHEDULED):
        answer = cluster.ask(listing, group, version, cluster.namespace, plural, unless=404)
        objects[plural] = (answer or {}).get("items", [])
    runs = [run for run in objects["workflows"] if OWNER not in run["metadata"].get("labels", {})]
    if not runs or not objects[SCHEDULED[2]]:
        return "none to compare"
    # Runs that no schedule has created have what Pipelines gives now.
    newest = max(runs, key=lambda run: str(run["metadata"].get("creationTimestamp")))
    current = _images(newest)
    stale = {
        schedule["metadata"]["name"]: sorted(_images(schedule) - current)
        for schedule in objects[SCHEDULED[2]]
        if current and _images(schedule) and not _images(schedule) <= current
    }
    if stale:
        what = "; ".join(f"{name} runs {', '.join(images)}" for name, images in stale.items())
        raise UserError(
            f"{what}, and new runs {', '.join(sorted(current))}",
            "create them again after the upgrade of Pipelines: make schedule",
            Code.WRONG_VERSION,
        )
    return ", ".join(schedule["metadata"]["name"] for schedule in objects[SCHEDULED[2]])


def _images(resource: dict[str, Any]) -> set[str]:
    return set(PIPELINES_IMAGE.findall(json.dumps(resource.get("spec", {}))))


@contextmanager
def _disabled(client: Client, listed: list[Any]) -> Iterator[None]:
    """Disable recurring runs; if the block fails, re-enable those that were active."""
    active = [s.recurring_run_id for s in listed if s.mode == "ENABLE"]
    try:
        for schedule in active:
            client.recurring_runs.recurring_run_service_disable_recurring_run(schedule)
        yield
    except BaseException:  # Ctrl-C too: a schedule must not stay disabled
        for schedule in active:
            client.recurring_runs.recurring_run_service_enable_recurring_run(schedule)
        raise


@dataclass(frozen=True)
class Cron:
    """The values that each field allows.

    If both day fields are restricted, either may match, as in every cron.
    """

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day_is_enough: bool

    def after(self, start: datetime) -> Iterator[datetime]:
        """Yield the matching times after `start`, in its time zone."""
        midnight = start.replace(hour=0, minute=0, second=0, microsecond=0)
        for number in range(MAX_TIME_TO_MATCH.days):
            day = midnight + timedelta(days=number)
            # A week of cron begins with Sunday, 0; one of ISO ends with it, 7.
            of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
            on = of_month or of_week if self.any_day_is_enough else of_month and of_week
            if not on or day.month not in self.months:
                continue
            # The day matches: all of its times, in order.
            for hour in sorted(self.hours):
                for minute in sorted(self.minutes):
                    for second in sorted(self.seconds):
                        time = day.replace(hour=hour, minute=minute, second=second)
                        if time > start:
                            yield time


def parse_cron(text: str) -> Cron:
    """Read a cron expression with the grammar of Kubeflow's scheduler.

    Raises:
        UserError: not six fields (a crontab has five, without seconds), a value out of range, or a
            date that does not exist.
    """
    parts = text.split()
    if len(parts) == 5:
        raise UserError(
            f"cron {text!r}: has five fields, but Kubeflow's cron has six, seconds first",
            f'put a 0 before it: "0 {text.strip()}"',
            Code.INVALID_VALUE,
        )
    if len(parts) != len(FIELDS):
        raise UserError(
            f"cron {text!r}: {len(parts)} fields instead of six", CRON_HINT, Code.INVALID_VALUE
        )
    second, minute, hour, day, month, weekday = (
        _values(text, part, *field) for part, field in zip(parts, FIELDS, strict=True)
    )
    free = [part[0] in "*?" for part in (parts[3], parts[5])]
    cron = Cron(second, minute, hour, day, month, weekday, any_day_is_enough=not any(free))
    # From a leap year on: February 30th never comes, but the 29th does.
    if not any(True for _ in cron.after(datetime(2024, 1, 1, tzinfo=UTC))):
        raise UserError(f"cron {text!r}: this date does not exist", CRON_HINT, Code.INVALID_VALUE)
    return cron


def _values(
    text: str, field: str, name: str, low: int, high: int, names: list[str]
) -> frozenset[int]:
    """The values of a comma-separated list of `*`, `3`, `1-5`, `*/15`, `3/15` or `MON-FRI`."""
    values: set[int] = set()
    for item in field.upper().split(","):
        match = re.fullmatch(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?", item)
        if not match or (match[1] in "*?" and match[2]):
            raise UserError(
                f"cron {text!r}: {name}: {item!r} is not valid", CRON_HINT, Code.INVALID_VALUE
            )
        first, last, step = match.groups()
        begin: int | None = low  # None for a name that does not exist
        end: int | None = high
        if first not in "*?":
            begin = _number(first, low, names)
            # 3/15 is 3-59/15.
            end = _number(last, low, names) if last else high if step else begin
        if begin is None or end is None or not low <= begin <= end <= high or step == "0":
            known = f", or {names[0]} to {names[-1]}" if names else ""
            raise UserError(
                f"cron {text!r}: {name}: {item!r} is not in {low}-{high}{known}",
                CRON_HINT,
                Code.INVALID_VALUE,
            )
        values.update(range(begin, end + 1, int(step or 1)))
    return frozenset(values)


def _number(text: str, low: int, names: list[str]) -> int | None:
    if text in names:
        return low + names.index(text)
    return int(text) if text.isdecimal() else None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, epilog=HELP)


@app.command("set", epilog=HELP)
@takes_arguments
@takes_machines
def set_command(
    pipeline: str,
    arguments: dict[str, Any],
    cron: Annotated[str, typer.Option(help=CRON_HINT)],
    root: Root = "",
    strict: Strict = False,
    is_tried: Tried = True,
) -> None:
    """Run a pipeline on a schedule, replacing its earlier one."""
    name = f"lathe-{pipeline}"
    with error_messages():
        times = list(islice(parse_cron(cron).after(datetime.now(UTC)), 3))
        submission = prepare(pipeline, arguments, root, strict, is_tried)
        with answers():
            replaced = set_schedule(submission, name, cron)
    print(f"schedule {name}: {'updated' if replaced else 'created'}, {cron}")
    print("next runs, in UTC unless the server sets CRON_SCHEDULE_TIMEZONE:")
    for at in times:
        print(f"  {at:%a %Y-%m-%d %H:%M:%S}")


@app.command("remove", epilog=HELP)
def remove_command(
    pipeline: Pipeline,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for an active run instead of terminating it.")
    ] = False,
) -> None:
    """Remove a pipeline's schedule, and terminate its active run, if any."""
    name = f"lathe-{pipeline}"
    with error_messages():
        client = connect()
        with answers():
            listed = schedules(client, name)
            with _disabled(client, listed):
                end_runs(client, listed, wait)
            remove(client, listed)
    print(f"schedule {name}: {'removed' if listed else 'there was none'}")


if __name__ == "__main__":
    app()
