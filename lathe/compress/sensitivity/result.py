"""The result of a sensitivity analysis, and the statistics in it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lathe.model.folder import CheckpointFolder
from lathe_base.artifacts.kinds import SENSITIVITY, check_files, checked, read_json
from lathe_base.artifacts.metadata import Files
from lathe_base.config.settings.types import Format, SensitivityMetric, SensitivityMode
from lathe_base.errors import Code, UserError
from lathe_base.storage import sha256

RESULT = SENSITIVITY.metadata_file
PAGE = "sensitivity.html"
SAMPLE = 2**16  # number of values of which quartiles are computed

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Distribution:
    """Statistics of a weight's or an activation's values; quartiles come from at most 65,536 random
    ones.

    Attributes:
        channel_spread: largest absolute maximum of a channel (a weight's row, which is an output;
            an activation's feature) over the median one; large if few channels set the range of
            all. None if the median is 0.
        token_spread: for an activation, the largest absolute maximum of a token over the median
            one; thousands in a model with massive activations, for which static scales are bad.
            None for a weight, or if the median is 0.
        sqnr_db: signal to quantization noise, 10 log10(sum x^2 / sum (x_q - x)^2), decibels; None
            without noise. Each bit is worth 6 dB.
    """

    min: float
    q1: float
    median: float
    q3: float
    max: float
    absmax: float
    channel_spread: float | None
    sqnr_db: float | None
    token_spread: float | None = None


@dataclass
class Accumulator:
    """Computes a `Distribution` from parts, 2-D with one dimension of channels: sums and extremes,
    which need not be kept, and a sample of the values."""

    n_parts: int
    sample: list[Floats] = field(default_factory=list)
    low: list[Floats] = field(default_factory=list)
    high: list[Floats] = field(default_factory=list)
    tokens: list[Floats] = field(default_factory=list)
    signal: float = 0.0
    noise: float = 0.0

    def chosen(self, n: int) -> NDArray[np.int64] | None:
        """Indices of the sample among a part's `n` values, always the same; None means all."""
        size = SAMPLE // self.n_parts
        return np.random.default_rng(0).integers(0, n, size) if n > size else None

    def add(
        self,
        sample: Floats,
        low: Floats,
        high: Floats,
        signal: float,
        noise: float,
        tokens: Floats | None = None,
    ) -> None:
        """Add a part.

        Args:
            sample: representative values.
            low, high: minimum and maximum of every channel.
            signal, noise: sum x^2, sum (x_q - x)^2.
            tokens: absolute maximum of every token, of an activation.
        """
        if tokens is not None:
            self.tokens.append(tokens)
        self.sample.append(sample)
        self.low.append(low)
        self.high.append(high)
        self.signal += signal
        self.noise += noise

    def distribution(self) -> Distribution:
        """The statistics of everything that was added."""
        low, high = np.min(self.low, 0), np.max(self.high, 0)  # a channel each
        absmax = np.maximum(-low, high)
        tokens = np.concatenate(self.tokens) if self.tokens else None
        q1, median, q3 = np.quantile(np.concatenate(self.sample), [0.25, 0.5, 0.75]).tolist()
        return Distribution(
            min=float(low.min()),
            q1=q1,
            median=median,
            q3=q3,
            max=float(high.max()),
            absmax=float(absmax.max()),
            channel_spread=_spread(absmax),
            sqnr_db=10 * math.log10(self.signal / self.noise)
            if self.signal and self.noise
            else None,
            token_spread=None if tokens is None else _spread(tokens),
        )


def _spread(values: Floats) -> float | None:
    """The largest over the median one; None if that is 0."""
    typical = float(np.quantile(values, 0.5, method="lower"))
    return float(values.max()) / typical if typical else None


@dataclass(frozen=True)
class LinearScore:
    """The cost of quantizing one linear to the first of the analyzed formats.

    Attributes:
        score: in the metric's unit: loss or KL added, nats per token, or accuracy lost, 0 to 1.
        scores: the same by format if there are several, the narrowest first.
        estimate: KL added, nats per token, estimated from gradients.
        stderr: that of `score`, over the validation batches; None for an estimate or a single
            batch.
    """

    name: Annotated[str, Field(pattern=r"^(\w+\.\d+\.\w+\.\w+|lm_head)$")]
    score: float
    n_params: Annotated[int, Field(gt=0)]
    estimate: float
    weights: Distribution
    inputs: Distribution
    stderr: float | None = None
    scores: dict[Format, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SensitivityResult:
    """The ranking, worst first, and the resulting skips; all in the metric's unit.

    Attributes:
        model: digest of the analyzed checkpoint.
        baseline: the metric of the float model; in mode qat that of the quantized one.
        skip: the linears to leave in float, including those that the checkpoint already does.
        formats: those of the other linears, by name; empty in mode qat.
        predicted: predicted total cost of the quantized linears.
        rank_correlation: Spearman's correlation of scores and estimates; None without measurements.
    """

    mode: SensitivityMode
    metric: SensitivityMetric
    model: str
    baseline: float
    linears: list[LinearScore]
    skip: list[str]
    rule: str
    budget: float | None
    predicted: float
    rank_correlation: float | None
    engine: str = "torch"
    formats: dict[str, Format] = field(default_factory=dict)


def read_analysis(folder: Path) -> SensitivityResult:
    """Read the folder that `lathe analyze` wrote.

    Raises:
        UserError: there is none, or it is broken.
    """
    if not (folder / RESULT).is_file():
        raise UserError(
            f"{folder}: no {RESULT}", "give the folder that `lathe analyze` wrote", Code.WRONG_KIND
        )
    hint = "analyze the model again"
    values = read_json(folder / RESULT, hint)
    listed = checked(values.pop("files", {}), Files, f"{folder / RESULT}: files", hint)
    result = checked(values, SensitivityResult, str(folder / RESULT), hint)
    if not result.linears:
        raise UserError(f"{folder / RESULT}: linears is empty", hint, Code.MALFORMED)
    check_files(folder, RESULT, listed, hint)
    return result


def analysis_digest(folder: Path) -> str:
    """Digest of an analysis, after checking its files; raises as `read_analysis` does."""
    read_analysis(folder)
    return sha256(folder / RESULT)


def require_matching_analysis(model: CheckpointFolder, folder: Path) -> None:
    """Check that an analysis belongs to the checkpoint to quantize. In mode qat it analyzed a
    quantized checkpoint made from that one, with another digest.

    Raises:
        UserError: it belongs to another checkpoint; see also `read_analysis`.
    """
    analysis = read_analysis(folder)
    if analysis.mode != "qat" and analysis.model != model.digest:
        raise UserError(
            f"{folder}: analyzes checkpoint {analysis.model[:12]}, and {model.path} is "
            f"{model.digest[:12]}",
            "run `lathe analyze` on the model to quantize, or give its analysis",
            Code.MISMATCH,
        )
