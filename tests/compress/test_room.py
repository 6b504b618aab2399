"""Where a model is calibrated, rounded, scored and cut: on a GPU with room for it."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from lathe.compress import quantize
from lathe.train.workers import join_workers
from lathe_base.config.recipe import load_recipe


@pytest.mark.parametrize("free, device", [(120e9, "cuda"), (110e9, "cpu")])
def test_a_model_of_7b_is_calibrated_on_a_gpu_with_room(
    free: float,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The GPU's free memory is made up, since tests have none."""
    caplog.set_level(logging.INFO, "lathe")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 141e9))
    model = nn.Linear(2**16, 107_000, bias=False, device="meta")  # 28 GB
    with join_workers(load_recipe("tiny", ("Global.device=cpu",))) as group:
        on_gpu = replace(group, device=torch.device("cuda", 0))
        assert on_gpu.device_with_room(model, quantize.COPIES).type == device
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if device == "cuda" else logging.WARNING)
    assert "28.0 GB of weights" in record.getMessage()
