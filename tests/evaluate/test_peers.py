"""The gate's statistics equal those of statsmodels and scipy to nine digits."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm, ttest_rel

from lathe.evaluate.intervals import (
    accuracy_difference,
    cluster_totals,
    mcnemar,
    share_interval,
    unit_totals,
)

EXACT = {"rel": 1e-9, "abs": 1e-9}
TABLES = [(7, 1, 21), (30, 12, 2000), (250, 251, 5153), (0, 9, 40), (119, 80, 5153)]


@pytest.fixture
def scores() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of two models on 300 examples from 40 documents, correlated within documents."""
    rng = np.random.default_rng(0)
    documents = np.sort(np.concatenate([np.arange(40), rng.integers(0, 40, 260)]))
    first = rng.normal(0, 1, 40)[documents] + rng.normal(0, 1, 300)
    second = first + 0.1 + rng.normal(0, 0.3, 40)[documents] + rng.normal(0, 0.3, 300)
    return first, second, documents


@pytest.mark.parametrize(("lost", "gained", "n"), TABLES)
def test_mcnemar_is_that_of_statsmodels(lost: int, gained: int, n: int) -> None:
    from statsmodels.stats import contingency_tables

    table = [[n - lost - gained, lost], [gained, 0]]
    theirs = contingency_tables.mcnemar(table, exact=True).pvalue
    assert mcnemar(lost, gained) == pytest.approx(theirs, **EXACT)


@pytest.mark.parametrize(("lost", "gained", "n"), [t for t in TABLES if min(t[:2])])
def test_tangos_interval_ends_at_zero_where_the_asymptotic_mcnemar_says_so(
    lost: int, gained: int, n: int
) -> None:
    """statsmodels does not have Tango's interval, but the corresponding test is McNemar's."""
    from statsmodels.stats import contingency_tables

    table = [[n - lost - gained, lost], [gained, 0]]
    theirs = contingency_tables.mcnemar(table, exact=False, correction=False).pvalue

    def end(z: float) -> float:
        interval = accuracy_difference(lost, gained, n, 2 * norm.cdf(z) - 1)
        return interval.high if lost > gained else interval.low

    z = brentq(end, 0.01, 6.0, xtol=1e-13)
    assert 2 * norm.sf(z) == pytest.approx(theirs, rel=1e-6)


def test_a_mean_of_pairs_is_the_paired_t_test_of_scipy(
    scores: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    first, second, _ = scores
    theirs, ones = ttest_rel(second, first), np.ones(len(first))
    interval = unit_totals(second - first, ones).interval(0.95)
    expected = theirs.confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), **EXACT)
    assert unit_totals(second - first, ones).p_value() == pytest.approx(theirs.pvalue, **EXACT)


def test_a_mean_by_documents_is_the_cluster_robust_regression_of_statsmodels(
    scores: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    from statsmodels.api import OLS

    first, second, documents = scores
    ones = np.ones(len(first))
    fit = OLS(second - first, ones).fit(
        cov_type="cluster", cov_kwds={"groups": documents, "use_correction": True}, use_t=True
    )
    totals = cluster_totals(second - first, ones, documents)
    assert 15 < totals.degrees + 1 < 40  # the effective number of documents
    as_theirs = replace(totals, degrees=39)
    interval = as_theirs.interval(0.95)
    found = (interval.estimate, interval.low, interval.high)
    assert found == pytest.approx((fit.params[0], *fit.conf_int(0.05)[0]), **EXACT)
    assert as_theirs.p_value() == pytest.approx(fit.pvalues[0], **EXACT)
    equal = cluster_totals(second - first, ones, np.arange(300) % 40)
    assert cluster_totals(first, ones, np.arange(300) // 30).degrees == pytest.approx(9)
    assert equal.degrees == pytest.approx(39, abs=1)
    alone = unit_totals(second - first, ones).interval(0.95)
    assert interval.high - interval.low > 1.3 * (alone.high - alone.low)


def test_a_loss_per_token_is_the_weighted_cluster_robust_regression_of_statsmodels() -> None:
    from statsmodels.api import WLS

    rng = np.random.default_rng(1)
    tokens = rng.integers(50, 200, 60).astype(float)
    first = tokens * rng.normal(4, 0.5, 60)
    second = first + tokens * rng.normal(0.02, 0.05, 60)
    fit = WLS((second - first) / tokens, np.ones(60), weights=tokens).fit(
        cov_type="cluster", cov_kwds={"groups": np.arange(60), "use_correction": True}, use_t=True
    )
    interval = unit_totals(second - first, tokens).interval(0.99)
    found = (interval.estimate, interval.low, interval.high)
    assert found == pytest.approx((fit.params[0], *fit.conf_int(0.01)[0]), **EXACT)


@pytest.mark.parametrize(("hits", "n"), [(0, 50), (3, 50), (42, 2000), (50, 50)])
def test_a_share_has_wilsons_interval(hits: int, n: int) -> None:
    from statsmodels.stats.proportion import proportion_confint

    found = share_interval(hits, n, 0.95)
    theirs = proportion_confint(hits, n, alpha=0.05, method="wilson")
    assert (found.low, found.high) == pytest.approx(theirs, **EXACT)
