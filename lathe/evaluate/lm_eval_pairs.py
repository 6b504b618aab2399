"""Pair the samples of two runs of lm-evaluation-harness, document by document."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lathe.evaluate.comparison import Accuracy, MeanCost, MeanScore, Measure, Perplexity, Units
from lathe.evaluate.lm_eval_samples import PARTS, Key, LoggedTask, read_logged
from lathe.evaluate.paired_evaluations import Pair, Pairing
from lathe_base.errors import UserError
from lathe_base.storage import digest

HINT = "run lm_eval with the same tasks, filters and settings on both models"
HIGHER_IS_BETTER = {"acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match", "em", "f1"}
"""Metrics whose direction is known without the results of the run."""
PER_WEIGHT = {"word_perplexity", "byte_perplexity"}
"""Metrics with two numbers per document: a log-likelihood, and its words or bytes."""
TOLERANCE = 1e-6


def pair_logged(baseline: Path, candidate: Path, cluster_by: str | None) -> Pairing:
    """Pair two folders, or files, of lm-eval's samples by filter and `doc_id`.

    A metric of zeros and ones becomes an accuracy, `perplexity` and its relatives a perplexity, and
    any other number the mean of a score or a cost. A metric is skipped, with a note, if its values
    are not numbers, if the run's own figure is not their mean, or if it is unknown which direction
    is better.

    Args:
        cluster_by: the key of a document by which samples are clustered.

    Raises:
        UserError: a broken file; different tasks, versions, filters, metrics, documents, prompts or
            targets; or no metric that can be compared.
    """
    before, after = read_logged(baseline, cluster_by), read_logged(candidate, cluster_by)
    pairs: list[Pair] = []
    notes: list[str] = []
    _require_same(f"{baseline} and {candidate}", "tasks", before, after)
    for name in before:
        for found in _pair_task(before[name], after[name]):
            if isinstance(found, Pair):
                pairs.append(found)
            else:
                notes.append(found)
    if not pairs:
        raise UserError(f"{baseline}: no metric can be compared: {'; '.join(notes)}", HINT)
    described = (_described(baseline, before), _described(candidate, after))
    a, b = (digest("".join(logged.sha256 for logged in run.values())) for run in (before, after))
    return Pairing(tuple(pairs), *described, a, b, tuple(notes))


def _described(path: Path, run: Mapping[str, LoggedTask]) -> dict[str, Any]:
    """Description of a run for the verdict's file."""
    results = next(iter(run.values())).results
    return {
        "folder": str(path),
        "model": results.get("model_name"),
        "lm_eval": results.get("lm_eval_version"),
        "digests": {name: task.sha256 for name, task in run.items()},
    }


def _require_same(names: str, what: str, before: object, after: object) -> None:
    a, b = (set(found) if isinstance(found, dict | set) else {found} for found in (before, after))
    if a != b:
        shown = [", ".join(sorted(map(str, side))) or "none" for side in (a - b, b - a)]
        raise UserError(f"{names} differ in {what}: {shown[0]} against {shown[1]}", HINT)


def _pair_task(before: LoggedTask, after: LoggedTask) -> Iterator[Pair | str]:
    names = f"{before.path} and {after.path}"
    versions = [task.in_results("versions") for task in (before, after)]
    if None not in versions:
        _require_same(names, "version", *map(str, versions))
    _require_same(names, "filters", *({key[0] for key in t.samples} for t in (before, after)))
    for ours, theirs, path in ((before, after, after.path), (after, before, before.path)):
        if missing := [key[1] for key in ours.samples if key not in theirs.samples]:
            few = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise UserError(f"{path}: lacks {len(missing)} samples: doc_id {few}", HINT)
    for key, sample in before.samples.items():
        other = after.samples[key]
        for part, a, b in zip(PARTS, sample.hashes, other.hashes, strict=True):
            if a != b:
                raise UserError(f"{names}: doc_id {key[1]} has a different {part} in each", HINT)
        _require_same(f"{names}: doc_id {key[1]}", "metrics", set(sample.values), set(other.values))
    for filter_name in dict.fromkeys(key[0] for key in before.samples):
        keys = [key for key in before.samples if key[0] == filter_name]
        metrics = dict.fromkeys(name for key in keys for name in before.samples[key].values)
        for metric in metrics:
            yield _pair_metric(before, after, keys, metric)


def _pair_metric(
    before: LoggedTask, after: LoggedTask, keys: Sequence[Key], metric: str
) -> Pair | str:
    """The pair for one metric and filter, or the reason why there is none."""
    filter_name = keys[0][0]
    name = f"{before.name} {metric}" + (f" ({filter_name})" if filter_name != "none" else "")
    units = [_units(task, keys, metric) for task in (before, after)]
    if any(unit is None for unit in units):
        return f"{name} is skipped: it is not one number per document"
    first, second = (unit for unit in units if unit is not None)
    measure = _measure(before, metric, first, second)
    if measure is None:
        return f"{name} is skipped: no results_*.json says whether higher is better"
    for task, unit in ((before, first), (after, second)):
        reported = task.of_results("results", f"{metric},{filter_name}")
        own = measure.overall(unit)
        if isinstance(reported, int | float) and not math.isclose(
            reported, own, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        ):
            return (
                f"{name} is skipped: the run's {reported:.6g} is not a mean over documents, "
                f"which is {own:.6g}"
            )
    return Pair(name, measure, first, second)


def _units(task: LoggedTask, keys: Sequence[Key], metric: str) -> Units | None:
    """A row per document: the value, and for word and byte perplexities its weight."""
    size = 2 if metric in PER_WEIGHT else 1
    rows = []
    for key in keys:
        sample = task.samples[key]
        value = sample.values.get(metric)
        parts = value if isinstance(value, list) else [value]
        if len(parts) != size or None in parts:
            return None
        rows.append({"value": parts[0], "weight": parts[-1], "document": sample.document})
    return Units(task.path, {}, rows)


def _measure(task: LoggedTask, metric: str, first: Units, second: Units) -> Measure | None:
    """The comparison method of a metric; None if it is unknown which direction is better."""
    if metric == "perplexity" or metric in PER_WEIGHT:
        weighted = metric in PER_WEIGHT
        return Perplexity(
            key=metric,
            title=metric,
            loss=lambda units: -units.column("value"),
            tokens=lambda units: units.column("weight") if weighted else np.ones(len(units.rows)),
            method="linearized ratio over documents" if weighted else "paired Student's t",
            unit="documents",
            margin=lambda gate: gate.max_perplexity_increase,
        )
    higher = task.of_results("higher_is_better", metric)
    if higher is None and metric in HIGHER_IS_BETTER:
        higher = True
    if not isinstance(higher, bool):
        return None
    values = np.concatenate([first.column("value"), second.column("value")])
    if higher and np.isin(values, (0.0, 1.0)).all():
        return Accuracy(
            key=metric,
            title=metric,
            column="value",
            margin=lambda gate: gate.max_task_accuracy_drop,
        )
    is_share = bool((values >= 0).all() and (values <= 1).all())
    kind = MeanScore if higher else MeanCost
    return kind(
        key=metric,
        title=metric,
        column="value",
        margin=lambda gate: gate.max_task_accuracy_drop if is_share else None,
    )
