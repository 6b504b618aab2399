"""Intervals against published values, another algorithm, scipy's bootstrap and simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap, norm

from lathe.evaluate.intervals import Interval, accuracy_difference, mcnemar, unit_totals

Counts = tuple[int, int, int]  # lost, gained, n


@st.composite
def counts(draw: st.DrawFn) -> Counts:
    n = draw(st.integers(1, 6000))
    lost = draw(st.integers(0, n))
    return lost, draw(st.integers(0, n - lost)), n


def test_the_paired_table_of_bentur_2009() -> None:
    """Airway hyper-responsiveness of 21 children before and after transplantation: the example in
    Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014), (1, 1, 7, 12)."""
    interval = accuracy_difference(lost=7, gained=1, n=21, confidence=0.95)
    assert interval.estimate == pytest.approx(-6 / 21)
    assert (interval.low, interval.high) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert mcnemar(7, 1) == pytest.approx(0.0703, abs=5e-5)


@pytest.mark.parametrize(
    ("lost", "gained", "by_hand"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 5, 2 / 2**5),
        (1, 9, 2 * (1 + 10) / 2**10),
        (6, 2, 2 * (1 + 8 + 28) / 2**8),
    ],
)
def test_mcnemar_is_the_binomial_tail_twice(lost: int, gained: int, by_hand: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(by_hand)
    assert mcnemar(gained, lost) == pytest.approx(by_hand)


def quartic_limits(counts: Counts, confidence: float) -> tuple[float, float]:
    """Tango's limits as the outer roots of a quartic: Yang, Sun and Hardin, A non-iterative
    implementation of Tango's score confidence interval, Statistics in Medicine 32 (2013)."""
    lost, gained, n = counts
    g, d, s = norm.ppf((1 + confidence) / 2) ** 2, gained - lost, gained + lost
    roots = np.roots(
        [
            n**2 * (n / g + 1) ** 2,
            -n * d * (n / g + 1) * (4 * n / g + 1),
            2 * n * d**2 * (3 * n / g + 2) / g - n**2 * (s / g + 1),
            n * d * (2 * s / g + 1) - d**3 * (4 * n / g + 1) / g,
            d**2 * (d**2 / g - s) / g,
        ]
    )
    return float(roots.real.min()), float(roots.real.max())


@given(counts(), st.sampled_from([0.5, 0.8, 0.95, 0.999]))
def test_tangos_limits_are_the_roots_of_the_quartic(counts: Counts, confidence: float) -> None:
    interval = accuracy_difference(*counts, confidence)
    expected = quartic_limits(counts, confidence)
    # If nearly all pairs are discordant, roots nearly coincide and are accurate to half the digits.
    tolerance = 1e-7 if max(counts[:2]) < 0.9 * counts[2] else 1e-3
    assert (interval.low, interval.high) == pytest.approx(expected, abs=tolerance)


@given(counts())
def test_swapping_the_models_mirrors_the_interval(counts: Counts) -> None:
    lost, gained, n = counts
    there = accuracy_difference(lost, gained, n, 0.95)
    back = accuracy_difference(gained, lost, n, 0.95)
    assert (back.estimate, back.low, back.high) == (-there.estimate, -there.high, -there.low)
    assert -1 <= there.low <= there.estimate <= there.high <= 1


@given(counts())
def test_more_confidence_is_a_wider_interval(counts: Counts) -> None:
    narrow, wide = (accuracy_difference(*counts, level) for level in (0.9, 0.99))
    assert wide.low <= narrow.low and narrow.high <= wide.high


def test_the_interval_of_accuracy_covers_as_often_as_it_says() -> None:
    """Two models are right on 60 and 55 % of 200 examples, mostly on the same ones."""
    rng = np.random.default_rng(0)
    tables = rng.multinomial(200, [0.52, 0.08, 0.03, 0.37], size=1500)
    intervals = [accuracy_difference(lost, gained, 200, 0.95) for _, lost, gained, _ in tables]
    covered = np.mean([i.low <= -0.05 <= i.high for i in intervals])
    assert 0.935 < covered < 0.965


def loss_difference(
    first: np.ndarray, second: np.ndarray, tokens: np.ndarray, confidence: float
) -> Interval:
    return unit_totals(second - first, tokens).interval(confidence)


def paired_block_losses(rng: np.random.Generator, n: int, gap: float) -> tuple[np.ndarray, ...]:
    """Losses of two models on blocks of common difficulty."""
    tokens = rng.integers(100, 140, n).astype(float)
    hard = rng.normal(5.0, 0.5, n)
    first = tokens * (hard + rng.normal(0, 0.02, n))
    second = tokens * (hard + gap + rng.normal(0, 0.02, n))
    return first, second, tokens


def test_the_interval_of_losses_is_that_of_a_paired_bootstrap() -> None:
    first, second, tokens = paired_block_losses(np.random.default_rng(1), 400, 0.01)

    def ratio(d: np.ndarray, n: np.ndarray, axis: int = -1) -> np.ndarray:
        return d.sum(axis) / n.sum(axis)

    drawn = bootstrap(
        (second - first, tokens),
        ratio,
        paired=True,
        n_resamples=4000,
        method="BCa",
        rng=np.random.default_rng(2),
    ).confidence_interval
    interval = loss_difference(first, second, tokens, 0.95)
    width = interval.high - interval.low
    assert (interval.low, interval.high) == pytest.approx(tuple(drawn), abs=0.06 * width)
    # The blocks' own spread is 25 times as large: pairing removes it.
    assert width < 0.1 * 2 * 1.96 * (first / tokens).std() / 20


@pytest.mark.parametrize("n", [10, 60])
def test_the_interval_of_losses_covers_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(3)
    draws = [loss_difference(*paired_block_losses(rng, n, 0.01), 0.95) for _ in range(2000)]
    assert 0.935 < np.mean([i.low <= 0.01 <= i.high for i in draws]) < 0.965


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_swapping_the_models_mirrors_the_losses(seed: int, n: int) -> None:
    first, second, tokens = paired_block_losses(np.random.default_rng(seed), n, 0.0)
    there = loss_difference(first, second, tokens, 0.9)
    back = loss_difference(second, first, tokens, 0.9)
    mirrored = (-there.estimate, -there.high, -there.low)
    assert (back.estimate, back.low, back.high) == pytest.approx(mirrored, abs=1e-12)
