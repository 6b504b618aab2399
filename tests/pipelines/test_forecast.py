"""The forecast of the default run's remaining time."""

import re

import pytest

from pipelines.compiler.compile import built
from pipelines.local.log import Forecast, StageLog, usual_seconds

SECONDS = usual_seconds()


def full_stages() -> set[str]:
    """Stages of a run on this machine, without production."""
    spec = built("full").pipeline_spec
    dags = [spec.root.dag, *(component.dag for component in spec.components.values())]
    names = {name: task.component_ref.name for dag in dags for name, task in dag.tasks.items()}
    steps = {name for name, component in names.items() if not spec.components[component].dag.tasks}
    return steps - {"release", "notify"}


def test_the_forecast_knows_every_stage_of_the_default_run():
    assert set(SECONDS) == full_stages()


def minutes_left(said: str) -> float:
    value, unit = re.search(r"about (\d+) (s|min) left", said).groups()
    return float(value) / (60 if unit == "s" else 1)


@pytest.mark.parametrize("slowness", [0.5, 1, 5])
def test_the_forecast_follows_the_speed_of_this_machine(slowness):
    forecast, left = Forecast(), sum(SECONDS.values())
    for number, (stage, seconds) in enumerate(SECONDS.items(), start=1):
        said = forecast.end(stage, slowness * seconds)
        left -= seconds
        assert said.startswith(f"{number} of {len(SECONDS)} stages")
        if stage == "prune":
            assert minutes_left(said) == pytest.approx(slowness * left / 60, rel=0.25, abs=0.5)
    assert said == f"{number} of {number} stages"


def test_a_reused_stage_says_nothing_of_the_pace():
    forecast = Forecast()
    said = [forecast.end(stage, None) for stage in ("prepare", "pretrain")]
    left = sum(SECONDS.values()) - sum(SECONDS[s] for s in ("prepare", "pretrain"))
    assert minutes_left(said[-1]) == pytest.approx(left / 60, abs=0.5)


def test_the_log_of_a_default_run_says_what_is_left_after_each_stage():
    lines = (
        "10:00:00.000 - INFO - Executing task 'prepare'",
        "10:00:01.000 - INFO - Task 'prepare' finished with status SUCCESS",
    )
    shown = [text for line in lines for text in StageLog(Forecast()).feed(line)]
    assert shown == ["prepare"]  # the second log has not seen its start
    log = StageLog(Forecast())
    shown = [text for line in lines for text in log.feed(line)]
    assert re.fullmatch(r"    done in 0\.0 s; 1 of 15 stages, about \d min left", shown[1])
