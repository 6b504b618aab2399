"""What the steps of a run have used, as a table and in a line."""

from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from lathe_launch.usage import Usage

UNKNOWN = "-"


def duration(seconds: float) -> str:
    """A duration in the two largest of its units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _number(value: float) -> str:
    """Two decimals, or two digits of what is less than a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "took": ("hours", lambda hours: duration(3600 * hours)),
    "waited": ("waited_seconds", duration),
    "GPU-hours": ("gpu_hours", _number),
    "CPU-hours": ("cpu_hours", _number),
    "peak memory": ("peak_memory_gib", "{:.2f} GiB".format),
    "price": ("price", _number),
}
"""Title -> the field of `Usage`, and how it is shown."""


def shown(usage: Mapping[str, Usage]) -> Iterator[tuple[str, list[str]]]:
    """The columns of a table with a line for each step and one for the sum; columns without a
    figure, or of zeros, are omitted."""
    lines = [*usage.values(), sum(usage.values(), Usage())]
    for title, (name, show) in COLUMNS.items():
        values = [getattr(used, name) for used in lines]
        cells = [UNKNOWN if value is None else show(value) for value in values]
        if not set(cells) <= {UNKNOWN, "0"}:
            yield title, cells


def usage_table(usage: Mapping[str, Usage]) -> Table:
    """The table for a terminal."""
    table = Table("step")
    columns = dict(shown(usage))
    for title in columns:
        table.add_column(title, justify="right")
    for name, *cells in zip([*usage, "all"], *columns.values(), strict=True):
        table.add_row(name, *cells)
    return table


def total(usage: Mapping[str, Usage]) -> str:
    """The sum of all steps in words, with the step that needed the most memory."""
    used = sum(usage.values(), Usage())
    parts = []
    if used.gpu_hours:
        parts.append(f"{_number(used.gpu_hours)} GPU-hours")
    if used.cpu_hours is not None:
        parts.append(f"{_number(used.cpu_hours)} CPU-hours")
    if used.peak_memory_gib is not None:
        step = max(usage, key=lambda name: usage[name].peak_memory_gib or 0.0)
        parts.append(f"at most {used.peak_memory_gib:.2f} GiB of memory ({step})")
    if used.waited_seconds:
        parts.append(f"{duration(used.waited_seconds)} of waiting for nodes")
    if used.price is not None:
        parts.append(f"price {_number(used.price)}")
    return ", ".join(parts)
