"""Builds the notification of a finished run, and its page, from its results."""

import io
import logging

from rich.console import Console

from lathe.report.results import Results, read_results, read_text
from lathe_base.errors import StageError, UserError
from lathe_base.pages.html import render
from lathe_base.tracking.webhook import Notice

log = logging.getLogger("lathe")

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


def make_page(notice: Notice) -> str:
    """The run's report as HTML or, if it has none or the store does not answer, the notification.

    A report is up to three levels deep in the graph of Pipelines' UI; a copy of it is not.
    """
    try:
        if address := notice.links.get("report"):
            return read_text(address)
    except (UserError, StageError) as error:
        log.warning("cannot read the report: %s", error)
    title = f"{notice.pipeline}: {notice.state}"
    return render("lathe/report/notice.html.j2", title, text=notice.message()["text"])
