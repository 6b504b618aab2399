import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tokenizers import Tokenizer

from lathe.export.proof import linear_errors
from tests.support.small_export import UNIFORM, make_model, random_tokens, write_unproven

PROMPTS = [random_tokens(12, seed=n).tolist() for n in range(2)]
ZEROED = "h.1.mlp.c_proj"


@torch.no_grad()
@pytest.mark.parametrize("size", [0, 32])
def test_a_linear_whose_outputs_are_all_zero_is_compared(
    size: int, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_model(UNIFORM, int8=True, group_size=size)
    linear = model.get_submodule(ZEROED)
    linear.weight.zero_()
    linear.bias.zero_()
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    path = tmp_path / "model.onnx"
    errors = linear_errors(model, exported, path, PROMPTS)
    assert errors[ZEROED] < 0.1 and all(0 <= error <= 1 for error in errors.values())
    graph = onnx.load(path)
    bias = next(x for x in graph.graph.initializer if x.name == f"{ZEROED}.bias")
    ruined = np.full_like(numpy_helper.to_array(bias), np.nan)
    bias.CopyFrom(numpy_helper.from_array(ruined, bias.name))
    onnx.save(graph, path)
    assert math.isnan(linear_errors(model, exported, path, PROMPTS)[ZEROED])
