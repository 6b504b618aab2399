"""Pruned models that HF's classes cannot represent, padded with zeros for transformers and vLLM."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lathe.export.formats import compressed_tensors, require_values, write_formats
from lathe.export.formats.compressed_tensors import padded, uniform
from lathe.model import fake_quant
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code, StageError
from tests.support.errors import raises
from tests.support.families import VOCABULARY, make, save
from tests.support.pruned import CASES, GROUPS, QUERIES, pruned

TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(3))
FORMATS = {
    "weights alone": (LinearFormat(activation=None), {}),
    "int4": (LinearFormat(WeightFormat.grouped(16, 4), None), {"hidden_size": 64}),
}


def written(checkpoint: Checkpoint, folder: Path) -> Path:
    folder.mkdir()
    write_formats(checkpoint, folder, ExportSettings(formats=["compressed-tensors"]))
    return folder / compressed_tensors.FOLDER


@torch.no_grad()
def logits_in_transformers(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_transformers_computes_the_padded_model_as_lathe_the_pruned(
    case: str, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    checkpoint = pruned(case, byte_tokenizer, tmp_path / "checkpoint")
    assert not checkpoint.model.config.is_uniform
    theirs = logits_in_transformers(written(checkpoint, tmp_path / "export"))
    torch.testing.assert_close(theirs, checkpoint.model(TOKENS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@torch.no_grad()
def test_padding_changes_no_scale_of_a_quantized_model(
    form: str, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    fmt, sizes = FORMATS[form]
    checkpoint = pruned("llama", byte_tokenizer, tmp_path / "checkpoint", **sizes)
    model = checkpoint.model
    plan = QuantizationPlan(dict.fromkeys(model.config.linear_names(), fmt))
    reference = GPT(model.config).eval()  # in float, with the rounded weights
    reference.load_state_dict(model.state_dict())
    for name in plan.linears:
        weight = reference.get_parameter(f"{name}.weight")
        weight.copy_(fake_quantize_weight(weight, fmt.weight))
    fake_quant.insert(model, plan)
    model.config = model.config.with_quantization(plan)
    theirs = logits_in_transformers(written(checkpoint, tmp_path / "export"))
    torch.testing.assert_close(theirs, reference(TOKENS), atol=2e-5, rtol=1e-5)


def test_what_is_not_zero_in_the_padding_is_noticed(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    checkpoint = pruned("llama", byte_tokenizer, tmp_path / "checkpoint")
    file = written(checkpoint, tmp_path / "export") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, -1] = 0.01
    save_file(tensors, file, {"format": "pt"})
    with raises(Code.NOT_PROVED, "layers.1.mlp.down_proj", kind=StageError):
        require_values(checkpoint, tmp_path / "export", "compressed-tensors")


@pytest.mark.parametrize(
    ("case", "widths", "sizes"),
    [
        ("llama", GROUPS, (4, 2, 80)),
        ("llama", QUERIES, (4, 2, 80)),
        # Five heads do not divide 48 features.
        ("llama", {"n_head": (5, 1, 1), "kv_heads": (5, 1, 1), "n_inner": (7, 7, 7)}, (6, 6, 7)),
        # The family's head size is the hidden size divided by the number of heads.
        ("opt", {"n_head": (2, 1, 2), "n_inner": (5, 6, 7)}, (4, 4, 7)),
    ],
)
def test_the_uniform_shape_is_the_smallest_that_transformers_has(
    case: str,
    widths: dict[str, Any],
    sizes: tuple[int, int, int],
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    found = load_checkpoint(save(make(case), tmp_path, byte_tokenizer))
    shape = uniform(replace(found.model.config, **widths), tmp_path)
    assert shape.is_uniform
    assert (shape.n_head[0], shape.n_kv_head[0], shape.n_inner[0]) == sizes
    assert padded(found.model, tmp_path) is found.model  # with layers of one width


def test_a_model_that_zeros_would_change_is_refused(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config: GPTConfig = load_checkpoint(save(make("olmo2"), tmp_path, byte_tokenizer)).model.config
    uniform(replace(config, n_inner=(80, 33, 64)), tmp_path)
    with raises(Code.UNSUPPORTED, tmp_path, "norm of all heads"):
        uniform(replace(config, **GROUPS), tmp_path)
