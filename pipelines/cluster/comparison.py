"""Compares runs: the parameters that differ, and the metrics with ratios to the first run."""

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from lathe.report.results import Results
from lathe.report.summary import Row, columns

ABSENT = "-"


def comparison_table(
    titles: Sequence[str], parameters: Sequence[Mapping[str, str]], results: Sequence[Results]
) -> Table:
    """One column per run.

    Args:
        titles: of the columns.
        parameters: arguments of each run; omitted ones have the pipeline's defaults.
        results: recorded results of each run.
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
    for title, shown in _figures(results):
        table.add_row(title, *shown)
    return table


def _figures(results: Sequence[Results]) -> Iterator[tuple[str, list[str]]]:
    for name in dict.fromkeys(row.name for result in results for row in result.rows):
        models = [_named(result, name) for result in results]
        known = [model for model in models if model]
        for column in columns(known):
            shown = [str(column.cell(m, known[0])) if m else ABSENT for m in models]
            yield f"{name}: {column.title}", shown
    best = [result.best or {} for result in results]
    for name in dict.fromkeys(name for metrics in best for name in metrics):
        yield f"chosen: {name}", [f"{f[name]:.4g}" if name in f else ABSENT for f in best]


def _named(result: Results, name: str) -> Row | None:
    return next((row for row in result.rows if row.name == name), None)
