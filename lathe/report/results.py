"""The results of a pipeline run: the metrics, verdict and report of its last steps, the model that
it trained, and what every step has used.

They are read from the steps' artifacts, `<pipeline root>/<pipeline>/<run>/<step>/<execution>/
<artifact>` in the object store, or below the folder of a local run. Pipelines' own API (2.17) does
not return a step's outputs.
"""

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from lathe.evaluate.wording import outcome
from lathe.report.summary import Row, summary_table
from lathe_base import storage
from lathe_base.errors import Code, UserError
from lathe_launch.usage import PREFIX, Usage

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
AT_A_TIME = 8


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
        verdict: the gate's, in the words of `lathe.evaluate.wording.outcome`; empty without a gate.
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
    names: Iterable[str]  # oldest first
    if storage.is_store(location):
        names = storage.list_objects(location)
    else:
        paths = [x for x in Path(location).rglob("*") if x.is_file() and not x.is_symlink()]
        names = map(str, sorted(paths, key=lambda path: path.stat().st_mtime))
    files: dict[str, str] = {}
    checkpoints: dict[str, str] = {}
    recorded: dict[str, tuple[str, str]] = {}
    for name in names:
        if match := RECORDED.search(name):
            files[f"{match['step']}/{match['artifact']}"] = name
            if match["artifact"] == "metrics":
                place = name
                if not storage.is_store(location):  # the latest of those that used the folder
                    place = "/".join(Path(name).relative_to(location).parts[1:])
                recorded[place] = match["step"], name
        elif match := CHECKPOINT.match(name):
            checkpoints[match["step"]] = match["address"]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        metrics = list(pool.map(lambda one: (one[0], _json(one[1])), recorded.values()))
    by_step = dict(metrics)
    usage: dict[str, Usage] = {}
    for step, figures in metrics:
        usage[step] = usage.get(step, Usage()) + Usage.of_figures(figures)
    models = rows(by_step.get("report", {})) or [
        Row.of_figures(step.removeprefix(EVALUATION), {"flops": None} | figures)
        for step, figures in by_step.items()
        if step.startswith(EVALUATION) and {"n_params", "n_bytes"} <= figures.keys()
    ]
    verdict = _json(files["gate/verdict"]) if "gate/verdict" in files else {}
    trained = next(
        (Trained(s, by_step.get(s, {}), checkpoints[s], files.get(f"{s}/page", ""))
         for s in reversed(TRAINING) if s in checkpoints), None
    )  # fmt: skip
    return Results(
        tuple(models),
        {k: v for k, v in by_step.get("choose", {}).items() if PREFIX not in k} or None,
        outcome(verdict.get("verdict", ""), verdict.get("passed", False)),
        tuple(verdict.get("reasons", ())),
        files.get("report/page") or files.get("choose/page") or (trained.page if trained else ""),
        trained,
        {step: used for step, used in usage.items() if used != Usage()},
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
