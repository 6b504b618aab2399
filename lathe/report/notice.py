"""Builds the notification of a finished run from its results."""

import io

from rich.console import Console

from lathe.report.results import Results, read_results
from lathe_base.errors import StageError, UserError
from lathe_base.tracking.webhook import Notice

COLUMNS = 100


def make_notice(
    pipeline: str, run: str, state: str, location: str, page: str = "", why: str = ""
) -> Notice:
    """The notification of a run.

    Args:
        state: see `Notice`.
        location: folder or address of the run's artifacts. Unreadable results are omitted, with the
            reason in the notification.
        page: address of the run's page in the UI, if known.
        why: the reason for a failure, if known.
    """
    results, missing = Results(), ""
    try:
        results = read_results(location)
    except (UserError, StageError) as error:
        missing = f"no metrics: {error}"
    reasons = tuple(reason for reason in (why, missing, *results.reasons) if reason)
    links = {"run": page, "report": results.page}
    models = {row.name: row.figures() for row in results.rows}
    models |= {"chosen": dict(results.best)} if results.best else {}
    figures = {
        name: {key: value for key, value in metrics.items() if value is not None}
        for name, metrics in models.items()
    }
    table = ""
    if models:
        console = Console(file=io.StringIO(), width=COLUMNS, color_system=None)
        with console.capture() as capture:
            console.print(results.table())
        table = capture.get().rstrip()
    return Notice(
        pipeline,
        run,
        state,
        results.verdict,
        reasons,
        figures,
        table,
        {name: address for name, address in links.items() if address},
    )
