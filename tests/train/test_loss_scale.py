"""The dynamic loss scale follows DeepSpeed's, and its settings leave older runs as they were."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.train.result import FREE, run_identity
from lathe.train.schedule import LossScale
from lathe_base.artifacts.kinds import checked
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import MixPrecision
from lathe_base.storage import digest
from tests.support.small_run import SMALL


class Counted:
    """The rule in DeepSpeed's terms: iterations are counted from 0, and the interval since the last
    overflow, first assumed at -1, decides when the scale grows."""

    def __init__(self, value: float, window: int, hysteresis: int) -> None:
        self.value, self.window, self.hysteresis = value, window, hysteresis
        self.left, self.iteration, self.last = hysteresis, 0, -1

    def update(self, finite: bool) -> None:
        if not finite:
            self.last = self.iteration
            if self.left == 1:
                self.value = max(self.value / 2, 1.0)
            else:
                self.left -= 1
        elif (self.iteration - self.last) % self.window == 0:
            self.left = self.hysteresis
            self.value *= 2
        self.iteration += 1


def scale(value: float = 4096.0, **settings: int) -> LossScale:
    return LossScale.of(MixPrecision(dtype="float16", scale_loss=value, **settings))  # type: ignore[arg-type]


@given(
    st.lists(st.booleans(), max_size=80), st.integers(1, 6), st.integers(1, 4), st.integers(0, 12)
)
def test_the_scale_follows_deepspeeds_rule(
    steps: list[bool], window: int, hysteresis: int, exponent: int
) -> None:
    ours = scale(2.0**exponent, loss_scale_window=window, hysteresis=hysteresis)
    theirs = Counted(2.0**exponent, window, hysteresis)
    for finite in steps:
        ours.update(finite)
        theirs.update(finite)
        assert ours.value == theirs.value


def test_the_defaults_halve_at_once_and_double_after_2000_updates() -> None:
    ours = scale()
    ours.update(False)
    assert ours.value == 2048.0
    for _ in range(1999):
        ours.update(True)
    assert ours.value == 2048.0
    ours.update(True)
    assert ours.value == 4096.0


def test_an_overflow_that_hysteresis_tolerates_does_not_end_a_run_at_the_minimum() -> None:
    ours = scale(1.0, hysteresis=2)
    assert not ours.exhausted
    ours.update(False)
    assert ours.exhausted and ours.value == 1.0


def test_a_saved_scale_resumes_with_its_count_of_overflows() -> None:
    ours = scale(hysteresis=2)
    ours.update(False)
    resumed = checked(asdict(ours), LossScale, "trainer.json", "")
    resumed.update(False)
    assert resumed.value == 2048.0
    older = {"value": 8.0, "dynamic": True, "good_steps": 3, "failed_steps": 0, "skipped_steps": 1}
    assert checked(older, LossScale, "trainer.json", "") == LossScale(8.0, True, 3, 0, 1)


def test_the_defaults_leave_the_identity_of_older_runs(small_data: Path) -> None:
    """The settings of a run of a version without these keys had this digest."""
    recipe = load_recipe("tiny", SMALL)
    precision = {"loss_scale_window", "hysteresis", "fp8"}
    engine = dict.fromkeys(FREE["Engine"], True) | {"mix_precision": precision}
    model = {*FREE["Model"], "sliding_window", "vocab_size_divisible_unit"}
    older = FREE | {"Engine": engine, "Model": model, "Data": {"reset_attention"}}
    identity = run_identity(recipe, {}, small_data, 1)
    assert identity["settings"] == digest(recipe.model_dump_json(exclude=older))


@pytest.mark.parametrize("change", ["loss_scale_window=500", "hysteresis=2"])
def test_another_loss_scaling_is_another_run(small_data: Path, change: str) -> None:
    ours, other = (
        run_identity(load_recipe("tiny", [*SMALL, *changes]), {}, small_data, 1)
        for changes in ([], [f"Engine.mix_precision.{change}"])
    )
    assert ours["settings"] != other["settings"]
