"""Reading the results of a step after the next one has been launched changes no result."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lathe.train.optimizer import DeviceLossScale
from lathe.train.pretrain import pretrain
from lathe.train.schedule import LossScale
from lathe.train.trainer import Trainer
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import MixPrecision
from lathe_base.errors import Code, Preempted
from tests.support.errors import raises
from tests.support.small_run import SMALL, records
from tests.support.tables import quick_only

SHORT = (*SMALL, "Engine.max_steps=9", "Engine.eval_freq=4", "Engine.save_load.save_steps=3")
OVERFLOWS = (
    "Engine.mix_precision.dtype=float16",
    "Engine.mix_precision.scale_loss=1e9",
    "Engine.mix_precision.loss_scale_window=2",
)
CASES = {
    "float32": (),
    "overflows": OVERFLOWS,
    "overflows, O2": (*OVERFLOWS, "Engine.mix_precision.level=O2"),
}
TIMES = {"step_seconds", "reader_seconds", "tokens_per_second"}


def read_late(patch: pytest.MonkeyPatch) -> None:
    """Trainers read as on a GPU."""
    make = Trainer.__init__

    def late(self: Trainer, *arguments: Any) -> None:
        make(self, *arguments)
        self.lag = 1

    patch.setattr(Trainer, "__init__", late)


def trace(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "train.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.mark.parametrize("case", quick_only(CASES, ("float32", "overflows, O2")))
def test_a_step_read_late_leaves_trace_and_weights(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    recipe = load_recipe("tiny", (*SHORT, *CASES[case]))
    pretrain(recipe, small_data, tmp_path / "at once")
    read_late(monkeypatch)
    pretrain(recipe, small_data, tmp_path / "late")
    assert trace(tmp_path / "late") == trace(tmp_path / "at once")
    assert bool(records(tmp_path / "late", "skipped_steps")[-1]) == bool(CASES[case])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("at once", "late")]
    assert weights[0] == weights[1]
    seconds = records(tmp_path / "late", "step_seconds")
    assert min(seconds) > 0


def test_a_loss_that_is_not_finite_names_its_own_step(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("tiny", (*SHORT, "Optimizer.lr.max_lr=1e30"))
    messages = []
    for name in ("at once", "late"):
        with raises(Code.NOT_FINITE, "rank 0, documents") as caught:
            pretrain(recipe, small_data, tmp_path / name)
        messages.append(str(caught.value).partition("\n")[0])
        read_late(monkeypatch)
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_a_preempted_run_resumes_bit_for_bit(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("tiny", (*SHORT, *OVERFLOWS))
    read_late(monkeypatch)
    pretrain(recipe, small_data, tmp_path / "whole")
    after_step = Trainer.after_step

    def preempted(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.at.step == 4 and not resumed:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "after_step", preempted)
    resumed = False
    with pytest.raises(Preempted, match=r"saved at step [678] "):
        pretrain(recipe, small_data, tmp_path / "resumed")
    resumed = True
    pretrain(recipe, small_data, tmp_path / "resumed")
    assert trace(tmp_path / "resumed") == trace(tmp_path / "whole")
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")
    ]
    assert weights[0] == weights[1]


@given(
    st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)
)
def test_the_device_adapts_the_loss_scale_as_the_host_does(
    steps: list[bool], window: int, hysteresis: int, exponent: int
) -> None:
    settings = {"loss_scale_window": window, "hysteresis": hysteresis}
    host = LossScale.of(
        MixPrecision(dtype="float16", scale_loss=2.0**exponent, **settings)  # type: ignore[arg-type]
    )
    device = DeviceLossScale(host, torch.device("cpu"))
    for finite in steps:
        device.update(torch.tensor(float(not finite)))
        host.update(finite)
        assert device.value == host.value


def test_only_float16_scales_its_loss() -> None:
    scale = LossScale.of(MixPrecision(dtype="bfloat16"))
    for _ in range(4000):
        scale.update(True)
    assert scale.value == 1.0 and not scale.adapts
