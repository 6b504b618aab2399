"""A training as charts in a report and as separate pages: its loss curve, and the certificate of
killed and resumed training."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pydantic import BaseModel

from lathe.train.result import read_answers
from lathe.train.trace import TRACE
from lathe_base.artifacts.kinds import CHECKPOINT, PAGE, checked, read_json
from lathe_base.errors import Code, UserError
from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw
from lathe_base.storage import atomic_file, claim_output_file

HINT = "give the folder written by the stage, or run the stage again"
CERTIFICATE_HINT = "give the JSON file written by `lathe certify-resume`"
STAGES = {
    "pretrain": "pretraining",
    "finetune": "finetuning",
    "prune": "finetuning after pruning",
    "quantize": "QAT",
}
ROW_INCHES, FRAME_INCHES = 0.13, 1.0


def curve(name: str, checkpoint: Path, series: int = 0) -> Picture | None:
    """The chart of a checkpoint folder's recorded losses; None if there are none.

    Args:
        name: of the model, for the title.
        series: index of the model, which sets the color.

    Raises:
        UserError: the folder's records are corrupt.
    """
    path = checkpoint / TRACE
    records: list[dict[str, Any]] = []
    if path.is_file():
        # Of a training that is still running, the last line may be incomplete.
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            records = [json.loads(line) for line in lines if line.endswith("}\n")]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not JSON lines: {error}", HINT, Code.MALFORMED) from None
    if not any("loss" in record for record in records):  # quantized without training
        return None
    stage = checkpoint_metadata(checkpoint).get("stage", "training")
    title = f"{name}: {STAGES.get(stage, stage)}"
    alt = f"Loss of {title}, step {records[0]['step']} to {records[-1]['step']}"
    return picture(title, alt, partial(loss_curve, records, series))


def loss_curve(records: Sequence[Mapping[str, Any]], series: int, theme: Theme) -> str:
    """Training loss per step, its moving average, and the validation losses.

    Args:
        records: lines of `train.jsonl`.
        series: index of the candidate, which sets the color.
    """
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r], dtype=float)
    held_out = np.array([(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r])

    def paint(axes: Axes, theme: Theme) -> None:
        color = theme.color(series)
        if len(train):
            steps, losses = train.T
            axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(losses), color=color, linewidth=1.8, label="training")
        if len(held_out):
            steps, losses = held_out.T
            axes.plot(
                steps,
                losses,
                color=theme.ink,
                linewidth=1.2,
                linestyle=(0, (4, 2)),
                marker="o",
                markersize=4.5,
                label="validation",
                zorder=3,
            )
            axes.annotate(
                f"{losses[-1]:.3f}",
                (steps[-1], losses[-1]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="right",
                weight="bold",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.02, y=0.12)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    return draw(2.8, theme, paint)


def training_page(checkpoint: Path, output: Path) -> None:
    """Write a page with the loss curve and the figures of a trained checkpoint, and the answers of
    one that was finetuned on conversations.

    Args:
        checkpoint: its folder, or one with only its `lathe.json`, `train.jsonl` and `samples.json`.

    Raises:
        UserError: the folder's records are corrupt.
    """
    known = checkpoint_metadata(checkpoint)
    stage = known.get("stage", "training")
    summary = {
        key.replace("_", " "): f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"
        for key, value in known.get("metrics", {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    page = render(
        "lathe/report/training.html.j2",
        f"Lathe {STAGES.get(stage, stage)}",
        # None without a recorded loss, as of a model that was quantized without training.
        curve=curve("loss", checkpoint),
        figures=summary,
        answers=read_answers(checkpoint),
    )
    with atomic_file(output) as work:
        work.write_text(page, encoding="utf-8")


def checkpoint_metadata(checkpoint: Path) -> dict[str, Any]:
    """`lathe.json`; empty for a plain HF folder."""
    path = checkpoint / CHECKPOINT.metadata_file
    # A model that was quantized without training has no loss.
    return read_json(path, HINT, allow_nan=True) if path.is_file() else {}


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centered moving average over a tenth of the run, without lag. The window shrinks at the
    start, where the loss is steep, and is one-sided at the end."""
    n = len(values)
    at = np.arange(n)
    reach = np.minimum(n // 20, at)
    low, high = at - reach, np.minimum(at + reach, n - 1) + 1
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[high] - sums[low]) / (high - low))


class Planned(BaseModel):
    """A planned kill."""

    kind: str


class RecordedKill(BaseModel):
    """A kill in a certificate; see `lathe.release.certify.resume`."""

    planned: Planned
    step: int
    saved_step: int
    unfinished: list[str]


class End(BaseModel):
    """Digests of the final weights of one of the two trainings."""

    file: str


class RecordedDifference(BaseModel):
    """The first tensor that differs."""

    tensor: str
    largest: float | None = None


class Certificate(BaseModel):
    """The parts of a certificate that the page shows."""

    passed: bool
    steps: int
    processes: int
    seed: int
    kills: list[RecordedKill]
    uninterrupted: End
    resumed: End
    difference: RecordedDifference | None = None
    machine: str
    versions: Mapping[str, str]

    def picture(self) -> Picture:
        """A chart of every attempt, from the state it resumed from to its end."""
        title = "Attempts of the killed training"
        alt = f"{title}: {len(self.kills)} kills, at the steps " + ", ".join(
            str(kill.step) for kill in self.kills
        )
        return picture(title, alt, partial(attempts, self.kills, self.steps))


def read_certificate(path: Path) -> Certificate:
    """Read a certificate.

    Raises:
        UserError: it is none.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", CERTIFICATE_HINT, Code.NOT_FOUND)
    record = read_json(path, CERTIFICATE_HINT)
    return checked(record, Certificate, str(path), CERTIFICATE_HINT)


def certificate_page(certificate: Path, output: Path) -> None:
    """Write the page of a certificate to the file `output`.

    Raises:
        UserError: not a certificate, or `output` is something else.
    """
    # Before the certificate is read: a page of someone else's is not overwritten.
    claim_output_file(output, PAGE, certificate)
    record: Any = read_certificate(certificate)
    page = render(
        "lathe/report/certificate_page.html.j2", "Lathe resume certificate", certificate=record
    )
    with atomic_file(output) as work:
        work.write_text(page, encoding="utf-8")


def attempts(kills: Sequence[RecordedKill], steps: int, theme: Theme) -> str:
    """Draw a line for each attempt, the first one at the top, with the reason for its end."""
    # Every attempt begins at the state that the kill before it left.
    began = [0, *(kill.saved_step for kill in kills)]
    ended = [*(kill.step for kill in kills), steps]

    def paint(axes: Axes, theme: Theme) -> None:
        rows = range(len(began))
        axes.hlines(rows, began, ended, color=theme.muted, linewidth=1.4)
        for i, kind in enumerate(sorted({kill.planned.kind for kill in kills})):
            at = [(row, kill.step) for row, kill in enumerate(kills) if kill.planned.kind == kind]
            axes.plot(
                [step for _, step in at],
                [row for row, _ in at],
                color=theme.color(i),
                marker="x",
                linestyle="none",
                label=f"killed: {kind}",
            )
        axes.plot([steps], [len(kills)], color=theme.ink, marker="o", linestyle="none", label="end")
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("training step")
        axes.legend(loc="lower left", fontsize=8)

    return draw(FRAME_INCHES + ROW_INCHES * max(len(began), 8), theme, paint)
