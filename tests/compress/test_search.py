"""The search for the least pruned model that meets a target."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.config.recipe import load_recipe
from lathe.errors import StageError, UserError
from lathe.search.compress import compress
from lathe.search.goal import Goal, parse_goal
from lathe.search.ratios import next_ratios
from lathe.search.result import require_met
from lathe.search.trial import Trial
from tests.support.small_run import SMALL


@pytest.mark.parametrize(
    ("target", "budget"),
    [
        ("speed=0.4", "accuracy=-1"),
        ("latency", "accuracy=-1"),
        ("latency=fast", "accuracy=-1"),
        ("latency=1.5", "accuracy=-1"),
        ("latency=0.4", "loss=1"),
        ("latency=0.4", "accuracy=1"),
        ("latency=0.4", "perplexity=-0.1"),
        ("latency=0.4", "perplexity=nan"),
        ("latency=0.4", "perplexity=inf"),
        ("latency=0.4", "accuracy=nan"),
        ("latency=0.4", "accuracy=-inf"),
        ("latency=0.4", "accuracy=-101"),
        ("latency=nan", "accuracy=-1"),
        ("latency=inf", "accuracy=-1"),
        ("latency=-0.4", "accuracy=-1"),
        ("latency=0", "accuracy=-1"),
    ],
)
def test_goals_that_make_no_sense(target: str, budget: str) -> None:
    with pytest.raises(UserError, match=r"--target|--budget"):
        parse_goal(target, budget)


def test_goals() -> None:
    assert parse_goal("latency=0.4", "accuracy=-0.5") == Goal("latency", 0.4, "accuracy", 0.005)
    assert parse_goal("bytes=.2", "perplexity=0.05") == Goal("bytes", 0.2, "perplexity", 0.05)


@given(
    whole=st.floats(0.2, 0.9),
    fixed=st.floats(0.0, 0.5),
    target=st.floats(0.1, 0.9),
    power=st.floats(0.5, 2.0),
)
def test_ratios_close_in_on_the_target(
    whole: float, fixed: float, target: float, power: float
) -> None:
    """Where cost falls with the ratio and 3/4 is enough, the last but few trials meet the target
    with little to spare."""

    def cost(ratio: float) -> float:
        return whole * (fixed + (1 - fixed) * (1 - ratio) ** power)

    goal, done = Goal("latency", target, "perplexity", 0.1), []
    for ratio in next_ratios(goal, done):
        figures = dict.fromkeys(("prefill", "bytes", "parameters"), 1.0)
        done.append(Trial("", ratio, None, None, latency=cost(ratio), **figures))
        assert len(done) < 60
    ratios = [trial.ratio for trial in done]
    assert len(set(ratios)) == len(ratios)
    if cost(0.75) <= target:
        best = min(trial.ratio for trial in done if trial.meets(goal))
        assert best == 0 or cost(best - 2 / 64) > target or cost(best) >= 0.97 * target


@pytest.mark.slow
def test_search_tries_meets_and_goes_on(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    short = (*SMALL, "Engine.max_steps=4", "Optimizer.lr.warmup_rate=0.0", "Export.prompts=2")
    small = ("Sensitivity.eval_batches=1", "Sensitivity.calibration_batches=1")
    recipe = load_recipe("tiny", (*short, *small))
    goal = parse_goal("parameters=0.8", "perplexity=0.5")
    texts = (small_dense, small_data, tmp_path / "out")
    found = compress(goal, (recipe, recipe, recipe), *texts, trials=6)
    assert found.trials[0].ratio == 0 and not found.trials[0].meets(goal)
    best = require_met(found)
    assert best.meets(goal) and best.ratio > 0
    assert json.loads((tmp_path / "out" / "compress.json").read_text())["best"]["name"] == best.name
    page = (tmp_path / "out" / "compress.html").read_text()
    assert best.name in page and "data:image/svg+xml" in page

    trained = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    harder = parse_goal("parameters=0.01", "perplexity=0.5")
    with pytest.raises(StageError, match=r"no trial met parameters 0\.01"):
        require_met(compress(harder, (recipe, recipe, recipe), *texts, trials=1))
    assert trained == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    other = load_recipe("tiny", (*short, *small, "Engine.max_steps=5"))
    with pytest.raises(UserError, match="other settings"):
        compress(goal, (recipe, other, recipe), *texts)
