"""Statistics of a tensor's values, accumulated over batches on the tensor's own device."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.compress.sensitivity.result import Distribution

SAMPLE = 2**16  # number of values of which quartiles are computed

Floats = NDArray[np.floating[Any]]


@dataclass
class Accumulator:
    """Sums and extremes over 2-D parts, one dimension of which has the channels."""

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
