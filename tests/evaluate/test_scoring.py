import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.evaluate.intervals import mean_stderr, ratio_stderr
from lathe.evaluate.scoring import batches_by_tokens


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_batches_hold_every_index_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = batches_by_tokens(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
    sizes = [lengths[i] for batch in batches for i in batch]
    assert sizes == sorted(sizes, reverse=True)


def test_mean_stderr_of_a_proportion() -> None:
    hits = np.array([1.0] * 44 + [0.0] * 56)
    mean, stderr = mean_stderr(hits)
    assert mean == pytest.approx(0.44)
    assert stderr == pytest.approx(math.sqrt(0.44 * 0.56 / 99))
    assert math.isnan(mean_stderr(hits[:1])[1])


def test_block_stderr_matches_repeated_sampling() -> None:
    """Tokens within a block are correlated: the naive error would be far too small."""
    rng = np.random.default_rng(0)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        counts = rng.integers(20, 60, size=40).astype(float)
        levels = rng.normal(4.0, 0.5, size=40)
        return rng.normal(levels * counts, np.sqrt(counts)), counts

    draws = [sample() for _ in range(400)]
    spread = np.std([sums.sum() / counts.sum() for sums, counts in draws])
    estimates = [ratio_stderr(sums, counts) for sums, counts in draws]
    assert np.mean(estimates) == pytest.approx(spread, rel=0.1)
