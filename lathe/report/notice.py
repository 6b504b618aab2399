"""Builds the notification of a finished run from its results."""

import io

from rich.console import Console

from lathe.report.results import Results, read_results
from lathe_base.errors import StageError, UserError
from lathe_base.tracking.webhook import Notice

COLUMNS = 100


def notice_of(
    pipeline: str, run: str, state: str, place: str, page: str = "", why: str = ""
) -> Notice:
    """The notification of a run.

    Args:
        state: see `Notice`.
        place: folder or address of the run's artifacts. Unreadable results are omitted, with the
            reason in the notification.
        page: address of the run's page in the UI, if known.
        why: the reason for a failure, if known.
    """
    results, missing = Results(), ""
    try:
        results = read_results(place)
    except (UserError, StageError) as error:
        missing = f"no metrics: {error}"
    reasons = tuple(reason for reason in (why, missing, *results.reasons) if reason)
    links = {"run": page, "report": results.page}
    return Notice(
        pipeline,
        run,
        state,
        results.verdict,
        reasons,
        _figures(results),
        _table(results),
        {name: address for name, address in links.items() if address},
    )


def _figures(results: Results) -> dict[str, dict[str, float]]:
    models = {row.name: row.figures() for row in results.rows}
    models |= {"chosen": dict(results.best)} if results.best else {}
    return {
        name: {key: value for key, value in figures.items() if value is not None}
        for name, figures in models.items()
    }


def _table(results: Results) -> str:
    if not results.rows and results.best is None:
        return ""
    console = Console(file=io.StringIO(), width=COLUMNS, color_system=None)
    with console.capture() as capture:
        console.print(results.table())
    return capture.get().rstrip()
