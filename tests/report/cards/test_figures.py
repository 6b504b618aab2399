"""Intervals match those of independent implementations."""

import math

import pytest
from scipy.stats import norm

from lathe.evaluate.tasks import CLOZE, TEXT
from lathe.report.cards.evidence import interval


@pytest.mark.parametrize(("right", "n"), [(0, 20), (3, 20), (871, 2000), (20, 20)])
def test_of_an_accuracy_it_is_wilsons(right: int, n: int) -> None:
    from statsmodels.stats.proportion import proportion_confint

    found = interval(CLOZE.measures[0], right / n, None, n)
    assert found == pytest.approx(proportion_confint(right, n, method="wilson"), abs=1e-9)


def test_of_a_perplexity_it_is_that_of_its_logarithm() -> None:
    loss, error = 3.1, 0.04
    value = math.exp(loss)
    found = interval(TEXT.measures[0], value, value * error, 100)
    assert found == pytest.approx([math.exp(end) for end in norm.interval(0.95, loss, error)])
    assert interval(TEXT.measures[0], value, None, 1) is None
