"""The loss curve of a training, as a chart in a report or a separate page."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from lathe.report.figures import loss_curve
from lathe.train.result import read_answers
from lathe.train.trace import TRACE
from lathe_base.artifacts.kinds import CHECKPOINT, read_json
from lathe_base.errors import Code, UserError
from lathe_base.pages.html import Picture, picture, render
from lathe_base.storage import atomic_file

HINT = "give the folder written by the stage, or run the stage again"
STAGES = {
    "pretrain": "pretraining",
    "finetune": "finetuning",
    "prune": "finetuning after pruning",
    "quantize": "QAT",
}


def curve(name: str, checkpoint: Path, series: int = 0) -> Picture | None:
    """The chart of a checkpoint folder's recorded losses; None if there are none.

    Args:
        name: of the model, for the title.
        series: index of the model, which sets the color.

    Raises:
        UserError: the folder's records are corrupt.
    """
    path = checkpoint / TRACE
    records = _read_lines(path) if path.is_file() else []
    if not any("loss" in record for record in records):  # quantized without training
        return None
    stage = checkpoint_metadata(checkpoint).get("stage", "training")
    title = f"{name}: {STAGES.get(stage, stage)}"
    alt = f"Loss of {title}, step {records[0]['step']} to {records[-1]['step']}"
    return picture(title, alt, partial(loss_curve, records, series))


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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file, which may still be growing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("}\n")]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON lines: {error}", HINT, Code.MALFORMED) from None
