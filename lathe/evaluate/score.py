"""What every measure shares: log-likelihoods of target tokens, batches, means with an error."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lathe.model.gpt import GPT

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time


def target_scores(
    model: GPT, tokens: Tensor, rows: Tensor, columns: Tensor, targets: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Score n target tokens; logits are computed at their positions and nowhere else.

    Args:
        tokens: (B, T) input ids, short rows padded on the right (the mask is causal, so a pad
            changes nothing before it).
        rows, columns: (n,) positions in `tokens` whose next token is the target.
        targets: (n,) ids.

    Returns:
        (n,) natural log-likelihoods, and (n,) whether the target is the argmax.
    """
    hidden = model.hidden(tokens)[rows, columns]  # (n, C)
    scores, greedy = [], []
    for h, target in zip(
        torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True
    ):
        logits = model.head(h).float()  # (rows, V)
        chosen = logits.gather(1, target[:, None])[:, 0]
        scores.append(chosen.double() - logits.logsumexp(1).double())
        greedy.append(logits.argmax(1) == target)
    return torch.cat(scores).cpu().numpy(), torch.cat(greedy).cpu().numpy()


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


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, T) int64 of ragged rows, zeros on the right."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row)
    return out.to(device)


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
