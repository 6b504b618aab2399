"""Pairs the measures of two models on the same units, for the gate."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.evaluate.comparison import Accuracy, Measure, Units
from lathe.evaluate.evaluation_folder import Evaluation, read_evaluation
from lathe_base.errors import Code, UserError
from lathe_base.storage import digest

PARTS = ("protocol", "sources", "digests", "contamination")
"""Keys of `metrics.json` that a verdict repeats."""


@dataclass(frozen=True)
class Pair:
    """One measure of two models; `name` is its name in the verdict."""

    name: str
    measure: Measure
    before: Units
    after: Units


@dataclass(frozen=True)
class Pairing:
    """Two models measured on the same units.

    Attributes:
        before, after: description of each in the verdict's file: at least folder and digests.
        baseline: digest of the baseline, by which repeated comparisons are recognized; empty if it
            was not recorded.
        candidate: digest of the candidate and its evaluation data.
        notes: what could not be compared, and why.
    """

    pairs: tuple[Pair, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    baseline: str
    candidate: str
    notes: tuple[str, ...] = ()


def pair_evaluations(baseline: Path, candidate: Path, cluster_by: str | None) -> Pairing:
    """Pair two folders of `lathe evaluate`.

    Args:
        cluster_by: the key of an example that names its document.

    Raises:
        UserError: a folder is not an evaluation, or the two were measured on different data, or
            with a different tokenizer or protocol.
    """
    before, after = read_evaluation(baseline, cluster_by), read_evaluation(candidate, cluster_by)
    _require_same_measurement(before, after)
    pairs = [
        Pair(
            result.label(measure) if result.is_named else measure.title.lower(),
            measure,
            before.units[name],
            after.units[name],
        )
        for name, result in before.measured.items()
        for measure in result.task.measures
    ]
    a, b = (evaluation.metrics["digests"].get("model") or "" for evaluation in (before, after))
    measured_on = digest(json.dumps([b, _digests(after)]))
    notes = tuple(
        f"{name}: the noise floor is unknown: evaluate the baseline with "
        "Offline_Eval.noise_floor=True and without a reference"
        for name, result in before.measured.items()
        if result.task.generates
        and any(
            before.units[name].noise_floor(measure.column) is None
            for measure in result.task.measures
            if isinstance(measure, Accuracy)
        )
    )
    return Pairing(tuple(pairs), _measured(before), _measured(after), a, measured_on, notes)


def _require_same_measurement(before: Evaluation, after: Evaluation) -> None:
    hint = "evaluate both models on the same data with the same recipe"
    names = f"{before.folder} and {after.folder}"
    a, b = (_digests(evaluation) for evaluation in (before, after))
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            raise UserError(
                f"{names} differ in {name}: {_short(a.get(name))} against {_short(b.get(name))}",
                hint,
                Code.MISMATCH,
            )
    ours, theirs = before.metrics["protocol"], after.metrics["protocol"]
    if ours != theirs:
        raise UserError(f"{names} differ in protocol: {ours} against {theirs}", hint, Code.MISMATCH)
    if any(len(before.units[name].rows) != len(after.units[name].rows) for name in before.units):
        raise UserError(f"{names} have different examples or blocks", hint, Code.MISMATCH)


def _digests(evaluation: Evaluation) -> dict[str, str | None]:
    """SHA-256 of a model's evaluation data, by name."""
    tokenizer = evaluation.metrics["digests"].get("tokenizer")
    results = evaluation.measured.items()
    return {**{name: result.digest for name, result in results}, "tokenizer": tokenizer}


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def _measured(evaluation: Evaluation) -> dict[str, Any]:
    parts = {name: evaluation.metrics[name] for name in PARTS}
    digests = {name: r.digest for name, r in evaluation.measured.items() if r.is_named}
    return {"folder": str(evaluation.folder), **parts, "digests": parts["digests"] | digests}
