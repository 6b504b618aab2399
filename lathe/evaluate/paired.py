"""Confidence intervals for the difference of two models that were measured on the same units.

Intervals are two-sided at a level such as 0.95. Only one end counts in a non-inferiority test, so
that test is one-sided at half the error (2.5 %), the convention of ICH E9 (1998), 3.3.2, 5.5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe.evaluate.score import ratio_stderr

POWER = 0.8
"""Chance that a test sees a difference, by convention."""

MOST_UNITS = 1e4
"""Times as many units, above which nobody will measure them."""


@dataclass(frozen=True)
class Interval:
    """A difference, second minus first, and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def detectable(self, confidence: float) -> float:
        """The smallest difference that a comparison as precise as this one would tell from none
        in POWER of all cases: so many standard errors as the two quantiles are together."""
        z, power = (float(scipy.stats.norm.ppf(p)) for p in ((1 + confidence) / 2, POWER))
        return (z + power) * (self.high - self.low) / (2 * z)

    def of_more(self, factor: float) -> "Interval":
        """Of so many times the units, with the same estimate and spread."""
        below, above = self.estimate - self.low, self.high - self.estimate
        root = math.sqrt(factor)
        return Interval(self.estimate, self.estimate - below / root, self.estimate + above / root)


def needed_units(n: int, interval: Callable[[float], Interval], limit: float) -> int | None:
    """Units that would tell on which side of `limit` the difference is, if its estimate stays; None
    if that takes more than MOST_UNITS times as many.

    Args:
        n: the units that there are.
        interval: of so many times the units.
    """

    def overlap(log_factor: float) -> float:
        """How far the interval reaches over the limit."""
        found = interval(math.exp(log_factor))
        return min(limit - found.low, found.high - limit)

    most = math.log(MOST_UNITS)
    if overlap(most) > 0:
        return None
    return math.ceil(n * math.exp(scipy.optimize.brentq(overlap, 0.0, most, xtol=1e-4)))


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
    low = _tango_low(lost, gained, n, confidence)
    return Interval((gained - lost) / n, low, -_tango_low(gained, lost, n, confidence))


def _tango_low(lost: float, gained: float, n: float, confidence: float) -> float:
    if lost == n:
        return -1.0
    z = float(scipy.stats.norm.ppf((1 + confidence) / 2))

    def excess(difference: float) -> float:
        """How far the observed difference is above what the test allows, times n."""
        # Maximum-likelihood estimate of the probability of a loss, given `difference`.
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        p = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * p + difference * (1 - difference))
        return gained - lost - n * difference - z * math.sqrt(max(variance, 0.0))

    # Where the variance vanishes, the estimate itself is a root too; the bracket ends before it.
    return float(scipy.optimize.brentq(excess, -1.0, (gained - lost) / n - 1e-12, xtol=1e-10))


def clustered_difference(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    documents: NDArray[np.int64],
    confidence: float,
) -> Interval:
    """Difference of two means over examples of which some come from the same document.

    Examples of one document are not independent, so the documents are the units: the cluster-robust
    variance CR1 of Liang and Zeger, Longitudinal data analysis using generalized linear models,
    Biometrika 73 (1986), with Student's t for the number of documents, as Cameron and Miller
    advise (A practitioner's guide to cluster-robust inference, Journal of Human Resources 50,
    2015).

    Args:
        first, second: (n,) a value per example.
        documents: (n,) the number of the document, from 0.
    """
    return ratio_interval(
        summed(second - first, documents), summed(np.ones(len(first)), documents), confidence
    )


def summed(values: NDArray[np.float64], documents: NDArray[np.int64]) -> NDArray[np.float64]:
    """The sum of the values of each document, (documents,)."""
    return np.bincount(documents, weights=values).astype(np.float64)


def loss_difference(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    tokens: NDArray[np.float64],
    confidence: float,
) -> Interval:
    """Difference of two mean losses per token, measured on the same blocks of a text.

    With one token per unit it is the paired t interval of the mean difference.

    Args:
        first, second: (blocks,) summed nats of each block, at least two.
        tokens: (blocks,) tokens of each.
    """
    return ratio_interval(second - first, tokens, confidence)


def ratio_interval(
    sums: NDArray[np.float64], counts: NDArray[np.float64], confidence: float
) -> Interval:
    """The mean sum(sums) / sum(counts) over independent units, with its interval.

    The linearized ratio estimator (Cochran, Sampling Techniques, section 6.3), with Student's t for
    the number of units.

    Args:
        sums: (units,) the total of each unit, at least two units.
        counts: (units,) over how many each total is.
    """
    estimate = float(sums.sum() / counts.sum())
    quantile = float(scipy.stats.t.ppf((1 + confidence) / 2, len(counts) - 1))
    reach = quantile * ratio_stderr(sums, counts)
    return Interval(estimate, estimate - reach, estimate + reach)


def t_test(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Two-sided p-value that the mean of `ratio_interval` is zero; with counts of one, that of the
    paired t-test."""
    estimate, stderr = sums.sum() / counts.sum(), ratio_stderr(sums, counts)
    if stderr == 0:
        return float(estimate == 0)
    return float(2 * scipy.stats.t.sf(abs(estimate) / stderr, len(counts) - 1))


def share_interval(hits: int, n: int, confidence: float) -> Interval:
    """The share of `n` examples, with the score interval of Wilson, Journal of the American
    Statistical Association 22 (1927)."""
    found = scipy.stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    return Interval(hits / n, float(found.low), float(found.high))
