"""Where a part of the work runs: on a GPU with room for it. Its memory is made up, since tests have
no GPU."""

import logging

import pytest
import torch

from lathe.compress.gptq import gptq_bytes
from lathe.model import fake_quant
from lathe.model.config import GPTConfig
from lathe.model.families import LLAMA
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe.train.room import (
    BY_BLOCK,
    ROOM_FOR_KERNELS,
    WHOLE,
    device_with_room,
    pass_bytes,
    whole_bytes,
)
from lathe_base.config.recipe import load_recipe

CUDA = torch.device("cuda", 0)


@pytest.fixture
def model_7b() -> GPT:
    """The shape of Llama 2 7B, without memory."""
    with torch.device("meta"):
        return GPT(
            GPTConfig(
                32000,
                *(4096, 4096, 128),
                *((32,) * 32, (11008,) * 32),
                architecture=LLAMA,
                kv_heads=(32,) * 32,
                tie_word_embeddings=False,
            )
        )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "lathe")
    return caplog


def give_memory(monkeypatch: pytest.MonkeyPatch, free: float, kept: float = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), int(141e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int(2 * kept))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: int(kept))


@pytest.mark.parametrize(
    "free, kept, device, way, said",
    [
        (40e9, 0, CUDA, WHOLE, "the whole model"),
        (20e9, 0, CUDA, BY_BLOCK, "one block after the other"),
        (20e9, 15e9, CUDA, WHOLE, "35.0 GB are free"),  # torch's own cache counts as free
        (8e9, 0, torch.device("cpu"), BY_BLOCK, "on the CPU, because"),
    ],
)
def test_the_first_way_that_fits_is_chosen_and_said(
    free: float,
    kept: float,
    device: torch.device,
    way: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    give_memory(monkeypatch, free, kept)
    needs = {WHOLE: int(28e9), BY_BLOCK: int(10e9)}
    assert device_with_room(load_recipe("tiny"), CUDA, "evaluation", needs) == (device, way)
    (record,) = log.records
    assert record.levelno == (logging.WARNING if device.type == "cpu" else logging.INFO)
    assert record.getMessage().startswith("evaluation: on ") and said in record.getMessage()


@pytest.mark.parametrize("setting, reason", [("cpu", "Global.device is cpu"), ("auto", "no GPU")])
def test_a_cpu_is_said_with_its_reason(
    setting: str, reason: str, log: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("tiny", (f"Global.device={setting}",))
    chosen = device_with_room(recipe, torch.device("cpu"), "GPTQ", {BY_BLOCK: 1})
    assert chosen == (torch.device("cpu"), BY_BLOCK)
    assert [record.getMessage() for record in log.records] == [f"GPTQ: on the CPU ({reason})"]


def test_estimates_of_7b(model_7b: GPT) -> None:
    """What the documents say of it: GB with batches of 8,192 tokens."""
    needed = (pass_bytes(model_7b, 8192, True) + ROOM_FOR_KERNELS) / 1e9
    assert needed == pytest.approx(14, abs=0.5)
    assert sum(p.nbytes for p in model_7b.parameters()) / 1e9 == pytest.approx(27, abs=0.5)
    assert whole_bytes(model_7b, 8192) > 27e9
    int4 = LinearFormat(WeightFormat.grouped(64, 4))
    names = model_7b.config.linear_names()
    fake_quant.insert(model_7b, QuantizationPlan(dict.fromkeys(names, int4)))
    needed = (gptq_bytes(model_7b, 8192) + ROOM_FOR_KERNELS) / 1e9
    assert needed == pytest.approx(26, abs=0.5)
