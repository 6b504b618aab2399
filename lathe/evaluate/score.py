"""What every measure shares: the scoring interface, batches, and means with an error.

Shapes: B rows of T tokens, n targets.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Scores = tuple[NDArray[np.float64], NDArray[np.bool_]]


class Scorer(Protocol):
    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        """Score n target tokens; logits are computed at their positions and nowhere else.

        Args:
            tokens: (B, T) input ids, short rows padded on the right (the model is causal, so a
                pad changes nothing before it).
            rows, columns: (n,) positions in `tokens` whose next token is the target, `rows`
                ascending.
            targets: (n,) ids.

        Returns:
            (n,) natural log-likelihoods, and (n,) whether the target is the argmax.
        """


def batches_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped by length, longest first, each group at most `budget` tokens when padded
    (a single row may be longer)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def mean_stderr(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean of independent values and its standard error s / sqrt(n); nan for fewer than two."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def ratio_stderr(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Standard error of sum(sums) / sum(counts) over independent blocks.

    The linearized ratio estimator (Cochran, Sampling Techniques, section 6.3); nan for fewer than
    two blocks.
    """
    m, total = len(sums), counts.sum()
    if m < 2:
        return math.nan
    residuals = sums - counts * (sums.sum() / total)
    return float(math.sqrt(m / (m - 1) * np.square(residuals).sum()) / total)
