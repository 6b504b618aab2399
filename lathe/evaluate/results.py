"""An evaluation folder: the figures of `lathe evaluate`, and the units that they are means of."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.artifacts.kinds import EVALUATION, check_files, read_metadata
from lathe.artifacts.metadata import EvaluationMetadata
from lathe.errors import UserError

METRICS = EVALUATION.metadata_file
EXAMPLES = "examples.jsonl"
BLOCKS = "blocks.jsonl"
KEYS = ("model", "cloze", "text", "protocol", "sources", "digests", "seconds")
HINT = "evaluate the model again"


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one model; empty arrays where a measure was not taken.

    Attributes:
        metrics: `metrics.json`.
        correct: (examples,) whether the last word was predicted.
        losses: (blocks,) summed nats of a stretch of the text.
        tokens: (blocks,) its tokens.
    """

    folder: Path
    metrics: dict[str, Any]
    correct: NDArray[np.bool_]
    losses: NDArray[np.float64]
    tokens: NDArray[np.float64]


def read_evaluation(folder: Path) -> Evaluation:
    """Read all of an evaluation folder.

    Raises:
        UserError: there is none, or it is broken or incomplete.
    """
    metrics = read_metrics(folder)
    cloze, text = metrics["cloze"] or {"examples": 0}, metrics["text"] or {"blocks": 0}
    (correct,) = _read_columns(folder / EXAMPLES, cloze["examples"], "correct")
    losses, tokens = _read_columns(folder / BLOCKS, text["blocks"], "loss", "tokens")
    return Evaluation(folder, metrics, correct.astype(bool), losses, tokens)


def read_log_likelihoods(evaluation: Evaluation) -> NDArray[np.float64]:
    """(examples,) nats of the cloze set's last words.

    Raises:
        UserError: the folder does not have them.
    """
    path, n = evaluation.folder / EXAMPLES, len(evaluation.correct)
    (log_likelihoods,) = _read_columns(path, n, "log_likelihood")
    return log_likelihoods


def read_metrics(folder: Path) -> dict[str, Any]:
    """`metrics.json` of an evaluation folder.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = folder / METRICS
    if not path.is_file():
        raise UserError(f"{folder}: no {METRICS}", "give the folder that `lathe evaluate` wrote")
    metadata = read_metadata(path, EvaluationMetadata, HINT)
    check_files(folder, METRICS, metadata.files, HINT)
    return {key: metadata.raw[key] for key in KEYS}


def _read_columns(path: Path, n: int, *names: str) -> list[NDArray[np.float64]]:
    """One array of `n` numbers a name."""
    try:
        rows = (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if n
            else []
        )
        columns = [np.array([float(row[name]) for row in rows]) for name in names]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", HINT) from None
    except (OSError, RecursionError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: broken", HINT) from None
    if not all(np.isfinite(column).all() for column in columns):
        raise UserError(f"{path}: holds NaN or infinity", HINT)
    if len(rows) != n:
        raise UserError(f"{path}: {len(rows)} lines, {METRICS} counts {n}", HINT)
    return columns
