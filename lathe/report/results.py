"""The results of a pipeline run: the metrics, verdict and report of its last steps, the model that
it trained, and what every step has used; as tables for a terminal, and as the notification of a
finished run.

They are read from the steps' artifacts, `<pipeline root>/<pipeline>/<run>/<step>/<execution>/
<artifact>` in the object store, or below the folder of a local run. Pipelines' own API (2.17) does
not return a step's outputs.
"""

import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lathe.evaluate.comparison import outcome
from lathe.report.summary import Row, summary_table
from lathe_base import storage
from lathe_base.errors import Code, StageError, UserError
from lathe_base.pages.html import render
from lathe_base.tracking.webhook import Notice
from lathe_launch.usage import PREFIX, Usage

log = logging.getLogger("lathe")

# Pipelines appends -2 to the name of a component's second step; the folder of an execution is a
# UUID or a number.
STEP = r"(?:^|/)(?P<step>[a-z][a-z0-9-]*?)(?:-\d+)?/(?:(?:[0-9a-f-]{36}|\d+)/)?"
RECORDED = re.compile(rf"{STEP}(?P<artifact>metrics|page|verdict)$")
"""Artifacts that are files of any step, in any sub-pipeline."""
CHECKPOINT = re.compile(
    rf"(?P<address>.*{STEP}(?:model|finetuned|pruned|quantized))/(?:lathe\.json|address\.txt)$"
)
"""Finished checkpoints, or pointers to them."""
TRAINING = ("pretrain", "finetune", "prune", "quantize")
"""Steps that train, in the order of a pipeline."""
EVALUATION = "evaluate-"
READERS = 8
"""Files that are read at a time."""
TABLE_COLUMNS = 100
"""Width of the table of a notification, characters."""


@dataclass(frozen=True)
class Trained:
    """The model of the last step that trained.

    Attributes:
        figures: those of its training.
        checkpoint: its address or path.
        page: address or path of the page with its loss curve; empty without one.
    """

    step: str
    figures: Mapping[str, float]
    checkpoint: str
    page: str

    def __str__(self) -> str:
        shown = {"step": "step {:,.0f}", "loss": "training loss {:.4g}"}
        shown |= {"eval_loss": "validation loss {:.4g}", "tokens_per_second": "{:,.0f} tokens/s"}
        parts = [text.format(self.figures[key]) for key, text in shown.items()
                 if key in self.figures]  # fmt: skip
        return f"{self.step}: {', '.join(parts)}"


@dataclass(frozen=True)
class Results:
    """The results of one run.

    Attributes:
        rows: the models' figures, the dense one's first; without a report, those of evaluations.
        best: figures of the model chosen by the pipeline `compress`.
        verdict: the gate's, in the words of `lathe.evaluate.comparison.outcome`; empty without
            one.
        reasons: those of the gate, a sentence each.
        page: address or path of the HTML report, or else of a training's page; empty without one.
        trained: the last model that the run trained; None if it trained none.
        usage: what every step of this run has used; steps that were reused have used nothing.
    """

    rows: tuple[Row, ...] = ()
    best: dict[str, float] | None = None
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    page: str = ""
    trained: Trained | None = None
    usage: Mapping[str, Usage] = field(default_factory=dict)

    def table(self) -> Table:
        """The table that `make run` prints."""
        if self.best is None:
            return summary_table(self.rows)
        table = Table("", "chosen")
        for name, value in self.best.items():
            table.add_row(name, f"{value:.4g}")
        return table


def read_results(location: str) -> Results:
    """The results below a folder or an address; the latest of each kind.

    Raises:
        UserError: the store does not answer, or rejects the keys; or a file is not a step's output.
    """
    # Oldest first, so that the latest of each kind replaces the others.
    names: Iterable[str]
    if storage.is_store(location):
        names = storage.list_objects(location)
    else:
        # A link is another name of a file that is found anyway.
        paths = [x for x in Path(location).rglob("*") if x.is_file() and not x.is_symlink()]
        names = map(str, sorted(paths, key=lambda path: path.stat().st_mtime))
    files: dict[str, str] = {}
    checkpoints: dict[str, str] = {}
    recorded: dict[str, tuple[str, str]] = {}  # step and file of the metrics of every execution
    for name in names:
        if match := RECORDED.search(name):
            files[f"{match['step']}/{match['artifact']}"] = name
            if match["artifact"] == "metrics":
                # Several local runs may have used the folder: the latest one's metrics count.
                key = name
                if not storage.is_store(location):
                    key = "/".join(Path(name).relative_to(location).parts[1:])
                recorded[key] = match["step"], name
        elif match := CHECKPOINT.match(name):
            checkpoints[match["step"]] = match["address"]
    with ThreadPoolExecutor(READERS) as pool:
        metrics = list(pool.map(lambda one: (one[0], _json(one[1])), recorded.values()))
    by_step = dict(metrics)
    # A step may be executed several times, as in a loop: what it used adds up.
    usage: dict[str, Usage] = {}
    for step, figures in metrics:
        usage[step] = usage.get(step, Usage()) + Usage.of_figures(figures)

    # Without a report's rows, the table is that of the evaluations.
    models = rows(by_step.get("report", {})) or [
        Row.of_figures(step.removeprefix(EVALUATION), {"flops": None} | figures)
        for step, figures in by_step.items()
        if step.startswith(EVALUATION) and {"n_params", "n_bytes"} <= figures.keys()
    ]
    verdict = _json(files["gate/verdict"]) if "gate/verdict" in files else {}
    # The last training of the pipeline whose checkpoint is complete.
    trained = next(
        (Trained(s, by_step.get(s, {}), checkpoints[s], files.get(f"{s}/page", ""))
         for s in reversed(TRAINING) if s in checkpoints), None
    )  # fmt: skip
    return Results(
        rows=tuple(models),
        best={k: v for k, v in by_step.get("choose", {}).items() if PREFIX not in k} or None,
        verdict=outcome(verdict.get("verdict", ""), verdict.get("passed", False)),
        reasons=tuple(verdict.get("reasons", ())),
        page=files.get("report/page")
        or files.get("choose/page")
        or (trained.page if trained else ""),
        trained=trained,
        usage={step: used for step, used in usage.items() if used != Usage()},
    )


def _json(name: str) -> dict[str, Any]:
    try:
        values = json.loads(read_text(name))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(
            f"{name}: not the output of a step", "run the pipeline again", Code.WRONG_KIND
        )
    return values


def read_text(name: str) -> str:
    """The text of a file or of an object."""
    return storage.read_text(name) if storage.is_store(name) else Path(name).read_text("utf-8")


def rows(metrics: dict[str, float]) -> list[Row]:
    """The report's rows, from metrics named `dense.perplexity`."""
    table: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        name, _, figure = key.partition(".")
        if not key.startswith(PREFIX):
            table.setdefault(name, {})[figure] = value
    return [Row.of_figures(name, values) for name, values in table.items()]


def duration(seconds: float) -> str:
    """A duration in the two largest of its units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _number(value: float) -> str:
    """Two decimals, or two digits of what is less than a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


USAGE_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "took": ("hours", lambda hours: duration(3600 * hours)),
    "waited": ("waited_seconds", duration),
    "GPU-hours": ("gpu_hours", _number),
    "CPU-hours": ("cpu_hours", _number),
    "peak memory": ("peak_memory_gib", "{:.2f} GiB".format),
    "price": ("price", _number),
}
"""Title -> the field of `Usage`, and how it is shown."""


def usage_columns(usage: Mapping[str, Usage]) -> Iterator[tuple[str, list[str]]]:
    """The columns of a table with a line for each step and one for the sum; columns without a
    figure, or of zeros, are omitted."""
    lines = [*usage.values(), sum(usage.values(), Usage())]
    for title, (name, show) in USAGE_COLUMNS.items():
        values = [getattr(used, name) for used in lines]
        cells = ["-" if value is None else show(value) for value in values]
        if not set(cells) <= {"-", "0"}:
            yield title, cells


def usage_table(usage: Mapping[str, Usage]) -> Table:
    """The table for a terminal."""
    table = Table("step")
    columns = dict(usage_columns(usage))
    for title in columns:
        table.add_column(title, justify="right")
    for name, *cells in zip([*usage, "all"], *columns.values(), strict=True):
        table.add_row(name, *cells)
    return table


def usage_sentence(usage: Mapping[str, Usage]) -> str:
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
    # Only those that exist are sent.
    links = {"run": page, "report": results.page}
    models = {row.name: row.figures() for row in results.rows}
    models |= {"chosen": dict(results.best)} if results.best else {}
    figures = {
        name: {key: value for key, value in metrics.items() if value is not None}
        for name, metrics in models.items()
    }
    table = ""
    if models:
        # As text without colors, which chat programs would show as escape codes.
        console = Console(file=io.StringIO(), width=TABLE_COLUMNS, color_system=None)
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
