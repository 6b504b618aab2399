"""Exports at the edge of what can be measured."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.export.fidelity import compare_with_float
from lathe.export.prompts import proof_prompts
from lathe.model.gpt import GPT
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_export import write_held_out
from tests.support.small_models import small_config


class Same:
    """An engine that computes what torch does."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.model(torch.from_numpy(tokens)).numpy()
        return logits


@torch.no_grad()
@pytest.mark.parametrize("is_zero", [True, False])
def test_constant_logits_are_compared(is_zero: bool) -> None:
    model = GPT(small_config())
    model.initialize(0.2, seed=1)
    row = 0.0 if is_zero else 1.0
    model.embedding.weight.copy_(torch.full_like(model.embedding.weight, row))
    found = compare_with_float(model, model, Same(model), [[1, 2, 3]], [[0, 0]])
    assert found.logit_error == found.kl == 0
    assert found.perplexity == pytest.approx(384, rel=1e-4)
    json.dumps(asdict(found), allow_nan=False)
    assert math.isfinite(found.kl_limit)


def test_a_model_of_two_positions_is_refused(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_held_out(tmp_path / "data")
    with raises(Code.UNSUPPORTED, "2 tokens", "need 3"):
        proof_prompts(byte_tokenizer, data, ExportSettings(), 2)
    prompts, new_tokens = proof_prompts(byte_tokenizer, data, ExportSettings(), 3)
    assert {len(prompt) for prompt in prompts} == {2} and new_tokens == 1
