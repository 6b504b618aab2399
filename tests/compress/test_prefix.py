"""A prefix absorbs the massive activations of a text's first token, so that static scales work."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from lathe.backends.paddle_support import require_supported
from lathe.compress.activation import find_prefix, massive_tokens
from lathe.compress.plan import make_plan
from lathe.compress.quantize import quantize
from lathe.export.export import export
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import require_gpt2
from lathe.model.gpt import GPT
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.massive import MASSIVE, SCALE, gpt2, plant, plant_at_start
from tests.support.small_export import save
from tests.support.small_run import SMALL

TOKENS = torch.randint(256, (8, 48), generator=torch.Generator().manual_seed(4))
END = 256
PREFIX = "Compress.Quantization.prefix"
SCALES = "Compress.Quantization.activation_quantize_type"
STATIC = (*SMALL, f"{SCALES}=moving_average_abs_max", "Engine.max_steps=2")


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer: Tokenizer) -> GPT:
    return plant_at_start(gpt2(tmp_path, byte_tokenizer), SCALE)


def found(model: GPT, *overrides: str) -> tuple[int, ...]:
    recipe = load_recipe("tiny", (*STATIC, *overrides))
    return find_prefix(recipe, model, [TOKENS], {}, END)


@torch.no_grad()
def logits(model: GPT, is_static: bool) -> torch.Tensor:
    if not is_static:
        return model(TOKENS).log_softmax(-1)
    plan = make_plan(model.config, load_recipe("tiny", STATIC).Compress.Quantization)
    with fake_quant.inserted(model, plan):
        fake_quant.calibrate(model, [TOKENS])
        return model(TOKENS).log_softmax(-1)


def test_one_token_makes_static_scales_hold(model: GPT) -> None:
    assert set(massive_tokens(model, [TOKENS])) == set(TOKENS[:, 0].tolist())
    reference, static = (logits(model, is_static) for is_static in (False, True))
    prefix = found(model)
    assert len(prefix) == 1 and torch.equal(logits(model, False), reference)
    model.set_prefix(prefix)
    assert not massive_tokens(model, [TOKENS])
    losses = [
        float(F.kl_div(q, reference, reduction="batchmean", log_target=True)) / TOKENS.shape[1]
        for q in (static, logits(model, True))
    ]
    assert losses[1] < losses[0] / 3


def test_no_prefix_is_added_without_a_gain(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    within = plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE)
    assert found(within) == ()
    assert len(found(within, f"{PREFIX}=2")) == 2
    assert found(gpt2(tmp_path, byte_tokenizer)) == ()
    assert found(model, f"{PREFIX}=none") == ()
    assert found(model, f"{SCALES}=auto") == ()
    assert (
        found(model, "Data.Train.dataset.max_seq_len=64") == ()
    )  # leaves no position for a prefix
    assert found(model, "Distributed.mp_degree=2") == ()


def test_an_impossible_prefix_is_rejected_by_name(model: GPT) -> None:
    with raises(
        Code.CONFLICTING_OPTIONS, "Compress.Quantization.prefix is 1", "Distributed.mp_degree 2"
    ):
        found(model, f"{PREFIX}=1", "Distributed.mp_degree=2")
    with raises(Code.INVALID_VALUE, "prefix 1"):
        found(model, f"{PREFIX}=1", f"{SCALES}=auto")
    paddle = load_recipe("tiny", (*STATIC, f"{PREFIX}=1", "Compress.engine=paddle"))
    with raises(Code.UNSUPPORTED, "Compress.Quantization.prefix is 1"):
        require_supported("quantize", paddle)
    model.set_prefix((END,))
    with raises(Code.UNSUPPORTED, "run/q", "prefix of 1 tokens", "the Paddle engine"):
        require_gpt2(model.config, "run/q", "the Paddle engine")


@pytest.mark.slow
def test_a_model_is_trained_saved_and_exported_with_its_prefix(
    model: GPT, small_data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    dense = save(model, byte_tokenizer, tmp_path / "dense")
    recipe = load_recipe("tiny", (*STATIC, "Export.prompts=4", "Export.new_tokens=8"))
    quantize(recipe, dense, small_data, tmp_path / "q")
    made = load_checkpoint(tmp_path / "q").model
    plan = made.config.quantization
    assert made.config.n_prefix == 1 and made.config.n_positions == model.config.n_positions - 1
    assert plan is not None and set(plan.activation_scales) == set(plan.linears)
    model.set_prefix(made.config.prefix_tokens)
    for kept, expected in zip(made.prefix, model.prefix, strict=True):
        torch.testing.assert_close(kept[0], expected[0], rtol=1e-4, atol=1e-4)
    folder = export(recipe, tmp_path / "q", small_data, tmp_path / "onnx").folder
    assert "prefix.npy" in json.loads((folder / "export.json").read_text(encoding="utf-8"))["files"]
