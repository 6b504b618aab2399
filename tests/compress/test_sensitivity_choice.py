"""The choice of formats is optimal, checked by brute force."""

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.compress.plan import bytes_per_weight, choose, choose_skips
from lathe.compress.sensitivity.result import Distribution, LinearScore
from lathe_base.config.settings import SensitivitySettings
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code
from tests.support.errors import raises

FLAT = Distribution(-1, -0.5, 0, 0.5, 1, 1, None, None)


@given(
    st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=1, max_size=8),
    st.floats(0, 3),
    st.integers(0, 8),
)
def test_no_smaller_choice_meets_the_budget(
    scores: list[float], budget: float, max_skips: int
) -> None:
    ranked = [
        LinearScore(str(i), s, 1, s, FLAT, FLAT) for i, s in enumerate(sorted(scores, reverse=True))
    ]
    settings = SensitivitySettings(budget=budget, max_skips=max_skips)
    choice = choose_skips(ranked, "static_int8", settings)
    skip, predicted = choice.skip, choice.predicted

    def cost(left_in_float: tuple[int, ...]) -> float:
        kept = [max(x.score, 0) for i, x in enumerate(ranked) if i not in left_in_float]
        return sum(sorted(kept))

    assert predicted == pytest.approx(cost(tuple(map(int, skip))), abs=1e-9)
    sizes = range(len(ranked) + 1)
    within = [
        size
        for size in sizes
        if any(cost(s) <= budget + 1e-9 for s in combinations(range(len(ranked)), size))
    ]
    best = [min(cost(s) for s in combinations(range(len(ranked)), size)) for size in sizes]
    assert len(skip) <= max_skips
    assert predicted == pytest.approx(best[len(skip)], abs=1e-9)
    if within[0] < max_skips:
        # Sums within rounding error of the budget may fall on either side.
        close = any(abs(b - budget) < 1e-9 for b in best)
        assert len(skip) == within[0] or close
    elif predicted > budget:
        assert len(skip) == min(max_skips, len(ranked))


@pytest.mark.parametrize(
    ("settings", "skip", "predicted"),
    [
        (SensitivitySettings(budget=1.0), [], 0.8),
        (SensitivitySettings(budget=0.35), ["a"], 0.3),
        (SensitivitySettings(budget=0.0), ["a", "b", "c"], 0.0),
        (SensitivitySettings(budget=0.0, max_skips=2), ["a", "b"], 0.1),
    ],
    ids=str,
)
def test_skips_follow_the_stated_rule(
    settings: SensitivitySettings, skip: list[str], predicted: float
) -> None:
    ranked = [
        LinearScore(n, s, 1, s, FLAT, FLAT)
        for n, s in (("a", 0.5), ("b", 0.2), ("c", 0.1), ("d", -0.3))
    ]
    choice = choose(ranked, ["static_int8"], settings, 64)
    assert choice.skip == skip and set(choice.quantized.values()) <= {"static_int8"}
    assert choice.predicted == pytest.approx(predicted)


@given(
    st.lists(
        st.tuples(st.integers(-5, 100), st.integers(0, 50), st.integers(0, 30), st.integers(1, 50)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 200),
    st.integers(0, 5),
)
def test_formats_take_the_fewest_bytes_within_the_budget(
    linears: list[tuple[int, int, int, int]], budget: int, max_skips: int
) -> None:
    """Scores are whole thousandths, so that no sum is within rounding error of the budget."""
    forms: list[Format] = ["int4", "static_int8", "dynamic_int8"]
    ranked = [
        LinearScore(
            str(i), scores[0] / 1000, size, 0.0, FLAT, FLAT,
            scores={form: x / 1000 for form, x in zip(forms, scores, strict=True)},
        )
        for i, (*scores, size) in enumerate(sorted(linears, reverse=True))
    ]  # fmt: skip
    settings = SensitivitySettings(budget=(budget + 0.5) / 1000, max_skips=max_skips)
    choice = choose(ranked, forms, settings, 64)

    def figures(formats: Sequence[Format]) -> tuple[float, float]:
        chosen = list(zip(ranked, formats, strict=True))
        costs = [max(x.scores.get(form, 0.0), 0.0) for x, form in chosen]
        return float(np.sum(costs)), sum(
            x.n_params * bytes_per_weight(form, 64) for x, form in chosen
        )

    every = product([*forms, "float"], repeat=len(ranked))
    possible = [figures(formats) for formats in every if formats.count("float") <= max_skips]
    assert list(choice.formats) == [x.name for x in ranked] and len(choice.skip) <= max_skips
    cost, n_bytes = figures(list(choice.formats.values()))
    assert choice.predicted == pytest.approx(cost, abs=1e-12)
    within = [size for c, size in possible if c <= settings.budget]
    if within:
        assert cost <= settings.budget and n_bytes == pytest.approx(min(within))
    else:
        assert cost == pytest.approx(min(possible)[0], abs=1e-6)

    # The other way round: as many bits as one of the choices has.
    limit = sorted(possible, key=lambda x: x[1])[budget % len(possible)][1] * (1 + 1e-9)
    bits = 8 * limit / sum(x.n_params for x in ranked)
    settings = settings.model_copy(update={"bits_per_weight": bits})
    cost, n_bytes = figures(list(choose(ranked, forms, settings, 64).formats.values()))
    assert n_bytes <= limit * (1 + 1e-6)
    assert cost == pytest.approx(min(c for c, size in possible if size <= limit), abs=1e-5)
    least = min(size for _, size in possible)
    settings = settings.model_copy(update={"bits_per_weight": 0.99 * bits * least / limit})
    with raises(Code.INVALID_VALUE, "Sensitivity.bits_per_weight"):
        choose(ranked, forms, settings, 64)
