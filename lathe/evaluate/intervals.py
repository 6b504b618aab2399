"""Means with standard errors, and confidence intervals for the difference of two models measured on
the same units.

Intervals are two-sided at a level such as 0.95. Only one end counts in a non-inferiority test, so
that test is one-sided at half the error (2.5 %), the convention of ICH E9 (1998), 3.3.2, 5.5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray

POWER = 0.8
"""Conventional statistical power: the probability that a test detects a difference."""

MAX_SAMPLE_FACTOR = 1e4
"""Factors above this are not reported, because nobody would evaluate that many units."""


@dataclass(frozen=True)
class Interval:
    """A difference, second minus first, and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def detectable(self, confidence: float) -> float:
        """The minimum detectable effect of a comparison with this precision at POWER: the standard
        error times the sum of both normal quantiles."""
        # The half-width is z standard errors, so dividing by z recovers the standard error.
        z, power = (float(scipy.stats.norm.ppf(p)) for p in ((1 + confidence) / 2, POWER))
        return (z + power) * (self.high - self.low) / (2 * z)

    def scaled_to(self, factor: float) -> "Interval":
        """The interval with `factor` times as many units, the same estimate and the same spread."""
        below, above = self.estimate - self.low, self.high - self.estimate
        root = math.sqrt(factor)
        return Interval(self.estimate, self.estimate - below / root, self.estimate + above / root)


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
    # Of a ratio of two totals, each of which varies from block to block: what varies beside the
    # ratio itself is the residual of each block.
    residuals = sums - counts * (sums.sum() / total)
    return float(math.sqrt(m / (m - 1) * np.square(residuals).sum()) / total)


def needed_units(n: int, interval: Callable[[float], Interval], limit: float) -> int | None:
    """Number of units that would show on which side of `limit` the difference is, if its estimate
    stays the same; None if that takes more than MAX_SAMPLE_FACTOR times as many.

    Args:
        n: the current number of units.
        interval: returns the interval with `factor` times as many units.
    """

    def overlap(log_factor: float) -> float:
        """How far the interval extends beyond the limit."""
        needed = interval(math.exp(log_factor))
        return min(limit - needed.low, needed.high - limit)

    # Intervals shrink monotonically with more units, so there is one root; it is sought in the
    # logarithm of the factor, which spans four decades.
    max_log_factor = math.log(MAX_SAMPLE_FACTOR)
    if overlap(max_log_factor) > 0:
        return None
    return math.ceil(n * math.exp(scipy.optimize.brentq(overlap, 0.0, max_log_factor, xtol=1e-4)))


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p-value that neither of two models is right more often than the other.

    McNemar (1947), with the binomial distribution in place of chi-squared.

    Args:
        lost: examples that the first gets right and the second wrong.
        gained: the opposite.
    """
    discordant = lost + gained
    return float(scipy.stats.binomtest(gained, discordant).pvalue) if discordant else 1.0


def accuracy_difference(lost: float, gained: float, n: float, confidence: float) -> Interval:
    """Difference of two accuracies on the same `n` examples, with Tango's score interval.

    Tango, Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design, Statistics in Medicine 17 (1998): the differences that a score test does
    not reject. Unlike Wald's, it keeps its level with few or no discordant pairs, and at a
    difference of 0 the test is McNemar's. `lost` and `gained` are those of `mcnemar`.
    """
    # The upper end is the lower end of the opposite difference.
    low = _tango_low(lost, gained, n, confidence)
    return Interval((gained - lost) / n, low, -_tango_low(gained, lost, n, confidence))


def _tango_low(lost: float, gained: float, n: float, confidence: float) -> float:
    if lost == n:  # the lowest possible difference, at which the search would begin
        return -1.0
    z = float(scipy.stats.norm.ppf((1 + confidence) / 2))

    def excess(difference: float) -> float:
        """The observed difference minus the largest that the test allows, times n."""
        # Maximum-likelihood estimate of the probability of a loss, given `difference`.
        # It is the larger root of a quadratic, of which b and c are coefficients.
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        p = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * p + difference * (1 - difference))
        return gained - lost - n * difference - z * math.sqrt(max(variance, 0.0))

    # Where the variance vanishes, the estimate itself is a root too; the bracket ends before it.
    return float(scipy.optimize.brentq(excess, -1.0, (gained - lost) / n - 1e-12, xtol=1e-10))


@dataclass(frozen=True)
class Totals:
    """Values summed over independent units: examples, blocks of a text, or documents.

    Attributes:
        sums: (units,) the total of each unit, at least two units.
        counts: (units,) number of values in each total.
        degrees: of freedom of Student's t.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    degrees: float

    def interval(self, confidence: float) -> Interval:
        """The mean sum(sums) / sum(counts), by the linearized ratio estimator (Cochran, Sampling
        Techniques, section 6.3)."""
        estimate = float(self.sums.sum() / self.counts.sum())
        quantile = float(scipy.stats.t.ppf((1 + confidence) / 2, self.degrees))
        reach = quantile * ratio_stderr(self.sums, self.counts)
        return Interval(estimate, estimate - reach, estimate + reach)

    def p_value(self) -> float:
        """Two-sided p-value that the mean is zero."""
        estimate, stderr = self.sums.sum() / self.counts.sum(), ratio_stderr(self.sums, self.counts)
        # All differences are equal: there is no distribution to test against.
        if stderr == 0:
            return float(estimate == 0)
        return float(2 * scipy.stats.t.sf(abs(estimate) / stderr, self.degrees))


def unit_totals(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Totals:
    """Totals of independent units; with counts of one this is the ordinary t-test."""
    return Totals(sums, counts, len(sums) - 1)


def cluster_totals(
    values: NDArray[np.float64], counts: NDArray[np.float64], clusters: NDArray[np.int64]
) -> Totals:
    """Totals of clusters, such as documents, whose examples are not independent.

    The variance is the cluster-robust CR1 of Liang and Zeger, Longitudinal data analysis using
    generalized linear models, Biometrika 73 (1986). The degrees of freedom are those of the
    effective number of clusters, which unequal sizes reduce: Carter, Schnepel and Steigerwald,
    Asymptotic behavior of a t-test robust to cluster heterogeneity, Review of Economics and
    Statistics 99 (2017), for the largest correlation within clusters.

    Args:
        values, counts: (n,) of each example.
        clusters: (n,) the index of its cluster, from 0.
    """
    sums, sizes = (np.bincount(clusters, weights=x).astype(np.float64) for x in (values, counts))
    # The effective number of clusters, (sum w)^2 / sum w^2, with weights w = size^2.
    weights = np.square(sizes)
    effective = float(np.square(weights.sum()) / np.square(weights).sum())
    return Totals(sums, sizes, max(effective - 1, 1.0))


def share_interval(hits: int, n: int, confidence: float) -> Interval:
    """The share of `n` examples, with the score interval of Wilson, Journal of the American
    Statistical Association 22 (1927)."""
    bounds = scipy.stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    return Interval(hits / n, float(bounds.low), float(bounds.high))
