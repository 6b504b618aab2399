"""Collects the facts about a model from the folders of its stages, with the figures of its
evaluation and their confidence intervals."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from scipy.stats import binomtest  # type: ignore[import-untyped]

from lathe.data.tokens import TokenDataset
from lathe.evaluate import comparison
from lathe.evaluate.comparison import Accuracy, Measure, outcome
from lathe.evaluate.evaluation_folder import measured, read_metrics
from lathe.model.card import model_name
from lathe.model.config import GPTConfig, read_config
from lathe.model.folder import (
    MARKER,
    WEIGHTS,
    hub_name,
    read_origin,
    require_checkpoint,
    training_data,
)
from lathe_base.artifacts.kinds import EXPORT, open_export, read_as
from lathe_base.artifacts.metadata import ExportMetadata, Origin
from lathe_base.errors import Code, UserError
from lathe_base.storage import sha256

CONFIDENCE = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A figure of an evaluation.

    Attributes:
        label: its name in tables.
        interval: the interval at `CONFIDENCE`; None if the standard error is unknown.
        n: number of units; `unit` names them.
        source, sha256: the evaluated file.
    """

    label: str
    measure: Measure
    value: float
    stderr: float | None
    interval: Interval | None
    n: int
    unit: str
    source: str
    sha256: str

    @property
    def kind(self) -> str:
        """`accuracy` or `perplexity`, the names of Hugging Face's metrics."""
        return "accuracy" if isinstance(self.measure, Accuracy) else "perplexity"

    @property
    def shown(self) -> str:
        """The figure as text for a table."""
        return self.measure.show(self.value)

    @property
    def shown_interval(self) -> str:
        """The interval as text for a table."""
        if self.interval is None:
            return "not known"
        low, high = (self.measure.show(end) for end in self.interval)
        return f"{low} to {high}"


@dataclass(frozen=True)
class Verdict:
    """The JSON file of `lathe gate`; `digests` are those of the candidate's evaluation."""

    verdict: comparison.Verdict
    passed: bool
    reasons: list[str]
    checks: list[comparison.Check]
    candidate: dict[str, Any]

    @property
    def outcome(self) -> str:
        """The verdict in words."""
        return outcome(self.verdict, self.passed)

    @property
    def undecided(self) -> list[str]:
        """The names of the measures that the gate could not decide."""
        return [check.measure for check in self.checks if check.verdict == "inconclusive"]


@dataclass(frozen=True)
class Evidence:
    """The facts about a model.

    Attributes:
        name: the recipe's `Serving.model_name`, the name on the Hub, or the folder's.
        digest: that of the checkpoint, or of the graph if only an export is given.
        files: SHA-256 of the model's files, by name.
        meta: `lathe.json`; empty for a Hugging Face model, and for an export without its
            checkpoint.
        figures: empty without an evaluation.
    """

    name: str
    digest: str
    files: Mapping[str, str]
    config: GPTConfig
    meta: Mapping[str, Any]
    origin: Origin
    figures: tuple[Figure, ...] = ()
    verdict: Verdict | None = None
    exported: ExportMetadata | None = None

    @property
    def is_export_alone(self) -> bool:
        """Whether only an export is given, without its checkpoint."""
        return self.exported is not None and WEIGHTS not in self.files


def read_evidence(
    model: Path,
    evaluation: Path | None = None,
    verdict: Path | None = None,
    exported: Path | None = None,
    data: Path | None = None,
    stated: Mapping[str, str] | None = None,
) -> Evidence:
    """Read the facts about a model from its folders, and check that they belong to this model.

    Args:
        model: a checkpoint, a Hugging Face model, or only an export.
        evaluation: folder of `lathe evaluate`, for the checkpoint or the export.
        verdict: JSON file of `lathe gate`, in which the model is the candidate.
        exported: of `lathe export`.
        data: the training data, for checkpoints that do not record it.
        stated: settings of the group Card that replace those of the checkpoint's recipe.

    Raises:
        UserError: a folder is of the wrong kind, or belongs to another model.
    """
    if (model / EXPORT.metadata_file).is_file():
        if exported is not None:
            raise UserError(
                f"{model}: is already an export",
                "give its checkpoint with --export",
                Code.WRONG_KIND,
            )
        evidence = _export_evidence(model)
    else:
        evidence = _checkpoint_evidence(model, exported, data)
    # The checkpoint may have been evaluated, or its graph: an evaluation names either.
    known = {evidence.digest} | ({evidence.exported.sha256} if evidence.exported else set())
    figures: tuple[Figure, ...] = ()
    if evaluation is not None:
        metrics = read_metrics(evaluation)
        _require_known_model(model, evaluation, metrics["digests"], known)
        figures = tuple(read_figures(metrics, evaluation))
    judged = None
    if verdict is not None:
        judged = read_as(verdict, Verdict, "give the JSON file of `lathe gate`")
        _require_known_model(model, verdict, judged.candidate.get("digests", {}), known)
    recipe = evidence.meta.get("recipe", {})
    # What is said now comes before what the recipe of the training said.
    card = {**recipe.get("Card", {}), **(stated or {})}
    meta = {**evidence.meta, "recipe": {**recipe, "Card": card}}
    return replace(evidence, meta=meta, figures=figures, verdict=judged)


def _export_evidence(folder: Path) -> Evidence:
    metadata = open_export(folder)
    listed = {name: entry.sha256 for name, entry in (metadata.files or {}).items()}
    files = {"model.onnx": metadata.sha256} | listed
    return Evidence(
        name=folder.resolve().name,
        digest=metadata.sha256,
        files=files | {EXPORT.metadata_file: sha256(folder / EXPORT.metadata_file)},
        config=read_config(folder),
        meta={},
        origin=Origin(),
        exported=metadata,
    )


def _checkpoint_evidence(model: Path, exported: Path | None, data: Path | None) -> Evidence:
    opened = require_checkpoint(model)
    folder, meta, digest = opened.path, opened.meta, opened.digest
    if meta:
        name, files = model_name(meta), {**meta["files"], MARKER: digest}
    else:  # a Hugging Face model, without a list of its files
        hub = hub_name(folder)
        name = hub[0] if hub else folder.resolve().name
        paths = [folder / name for name in ("config.json", WEIGHTS, "tokenizer.json")]
        files = {path.name: sha256(path) for path in paths if path.is_file()}
    metadata = open_export(exported) if exported is not None else None
    if metadata is not None and metadata.source != digest:
        raise UserError(
            f"{exported} was exported from a checkpoint other than {model}",
            "give the checkpoint that it came from",
            Code.MISMATCH,
        )
    origin = read_origin(meta, folder)
    if data is not None:
        trained_on = training_data(TokenDataset.open(data))
        if origin.data is not None and origin.data.sha256 != trained_on.sha256:
            raise UserError(
                f"{folder} was trained on a data set other than {data}",
                f"omit --data: {MARKER} records the training data",
                Code.MISMATCH,
            )
        origin = origin.model_copy(update={"data": trained_on})
    return Evidence(
        name=name,
        digest=digest,
        files=files,
        config=opened.config,
        meta=meta,
        origin=origin,
        exported=metadata,
    )


def _require_known_model(
    model: Path, folder: Path, digests: Mapping[str, Any], known: set[str]
) -> None:
    if digests.get("model") not in known:
        raise UserError(
            f"{folder}: belongs to a model other than {model}",
            "give the evaluation and verdict of this checkpoint or of its --export",
            Code.MISMATCH,
        )


def read_figures(metrics: Mapping[str, Any], folder: Path) -> Iterator[Figure]:
    """Every measure in `metrics.json`, as a figure.

    Args:
        folder: the evaluation folder, for messages.

    Raises:
        UserError: an unknown task, or one without its figures.
    """
    for result in measured(metrics, folder):
        entry = metrics["tasks"].get(result.name, {})
        n = int(result.figures[result.task.unit])
        for measure, value, stderr in result.scores():
            yield Figure(
                label=result.label(measure),
                measure=measure,
                value=value,
                stderr=stderr,
                interval=interval(measure, value, stderr, n),
                n=n,
                unit=result.task.unit,
                source=entry.get("source") or metrics["sources"].get(result.name) or result.name,
                sha256=result.digest or "",
            )


def interval(measure: Measure, value: float, stderr: float | None, n: int) -> Interval | None:
    """The confidence interval of a figure: for an accuracy Wilson's score interval (Wilson 1927),
    for a perplexity the normal interval of its logarithm, whose standard error is `stderr / value`.

    Args:
        n: number of examples of an accuracy.
    """
    if isinstance(measure, Accuracy):
        # Unlike the normal interval, it keeps its level near 0 and 100 %.
        bounds = binomtest(round(value * n), n).proportion_ci(CONFIDENCE, method="wilson")
        return float(bounds.low), float(bounds.high)
    if stderr is None:
        return None
    # In the logarithm the interval is symmetric, and no end is negative.
    ratio = math.exp(NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * stderr / value)
    return value / ratio, value * ratio
