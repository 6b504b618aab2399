"""Run a pipeline on the cluster periodically, at the times of a cron expression.

python -m pipelines.schedule set full --cron "0 0 3 * * 1"
python -m pipelines.schedule remove full
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from pipelines.arguments import Pipeline, takes_arguments
from pipelines.cron import HINT, parse_cron
from pipelines.server import HELP, Client, answers, connect
from pipelines.submit import (
    Gpus,
    NodePool,
    Nodes,
    Queue,
    Root,
    Submission,
    machines,
    prepare,
    told,
)
from pipelines.upload import find


def set_schedule(submission: Submission, name: str, cron: str) -> int:
    """Create the recurring run `name`, replacing those of the same name; never are two active.

    Returns:
        the number of recurring runs that it replaced.
    """
    client = submission.client
    with _disabled(client, schedules(client, name)) as old:
        models = client.api_models
        client.recurring_runs.recurring_run_service_create_recurring_run(
            models.V2beta1RecurringRun(
                display_name=name,
                mode=models.RecurringRunMode.ENABLE,
                trigger=models.V2beta1Trigger(cron_schedule=models.V2beta1CronSchedule(cron=cron)),
                no_catchup=True,
                max_concurrency="1",
                namespace=client.namespace,
                **submission.request(),
            )
        )
    remove(client, old)
    return len(old)


def schedules(client: Client, name: str) -> list[Any]:
    """The recurring runs of a name."""
    listing = client.recurring_runs.recurring_run_service_list_recurring_runs
    return find(listing, "recurring_runs", name, namespace=client.namespace)


def remove(client: Client, found: list[Any]) -> None:
    for schedule in found:
        client.recurring_runs.recurring_run_service_delete_recurring_run(schedule.recurring_run_id)


@contextmanager
def _disabled(client: Client, found: list[Any]) -> Iterator[list[Any]]:
    """Disable recurring runs; if the block fails, enable those that were active again."""
    active = [s.recurring_run_id for s in found if s.mode == "ENABLE"]
    try:
        for schedule in active:
            client.recurring_runs.recurring_run_service_disable_recurring_run(schedule)
        yield found
    except BaseException:
        for schedule in active:
            client.recurring_runs.recurring_run_service_enable_recurring_run(schedule)
        raise


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, epilog=HELP)


@app.command("set", epilog=HELP)
@takes_arguments
def set_command(
    pipeline: str,
    arguments: dict[str, Any],
    cron: Annotated[str, typer.Option(help=HINT)],
    nodes: Nodes = None,
    gpus: Gpus = None,
    node_pool: NodePool = "",
    queue: Queue = "",
    root: Root = "",
) -> None:
    """Run a pipeline at these times, replacing its earlier schedule."""
    name = f"lathe-{pipeline}"
    arguments["overrides"] = [*arguments["overrides"], *machines(nodes, gpus, node_pool, queue)]
    with told():
        times = list(islice(parse_cron(cron).after(datetime.now(UTC)), 3))
        submission = prepare(pipeline, arguments, root, fresh=True)
        with answers():
            replaced = set_schedule(submission, name, cron)
    print(f"schedule {name}: {'updated' if replaced else 'made'}, {cron}")
    print("next, in UTC unless the server's CRON_SCHEDULE_TIMEZONE is another:")
    for time in times:
        print(f"  {time:%a %Y-%m-%d %H:%M:%S}")


@app.command("remove", epilog=HELP)
def remove_command(pipeline: Pipeline) -> None:
    """Remove a pipeline's schedule; runs that have started continue."""
    name = f"lathe-{pipeline}"
    with told():
        client = connect()
        with answers():
            found = schedules(client, name)
            remove(client, found)
    print(f"schedule {name}: {'removed' if found else 'there was none'}")


if __name__ == "__main__":
    app()
