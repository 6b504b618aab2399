"""Small random models, float, INT8 and INT4, as checkpoint folders and as exports."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from lathe.export.export import write
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_base.config.settings import ExportSettings, Recipe
from lathe_base.config.settings.types import Bits
from lathe_serving.runtime.exported_model import METADATA
from lathe_serving.runtime.open_model import mean_difference
from lathe_serving.runtime.session import OnnxModel

UNIFORM = GPTConfig(384, 64, 48, 16, (3, 3), (96, 96))
PRUNED = GPTConfig(384, 64, 48, 16, (2, 1, 3), (80, 40, 96))


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, UNIFORM.vocab_size, shape, generator=generator)


PROMPTS = [random_tokens(n, seed=n).tolist() for n in (40, 7, 21, 33)]
LINEARS = ("h.0.attn.c_attn", "h.1.mlp.c_fc", "lm_head")  # a sample


def make_model(
    config: GPTConfig,
    int8: bool = False,
    skip: tuple[str, ...] = (),
    weight_only: bool = False,
    group_size: int = 0,
    wide: tuple[str, ...] = (),
    bits: Bits = 4,
    zero_points: bool = False,
    int8_cache: bool = False,
) -> GPT:
    """Make a model with random weights and biases, quantized if `int8`.

    Args:
        int8: quantize all linears but `skip`, calibrated on random tokens.
        weight_only: leave activations in float.
        group_size: quantize weights per group of this size to `bits` bits, with `zero_points`.
        wide: linears that stay INT8 with static scales despite `group_size`.
        int8_cache: quantize the KV cache, too.
    """
    model = GPT(config)
    model.initialize(0.2, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2, generator=generator)
    if int8:
        linears = (*model.config.linear_names(), HEAD)
        names = [n for n in linears if n not in skip]
        forms = {name: LinearFormat() for name in names}
        if group_size:
            weight = WeightFormat.grouped(group_size, bits, zero_points)
            grouped = LinearFormat(weight, "dynamic_int8")
            forms |= {name: grouped for name in names if name not in wide}
        if weight_only:
            forms = {name: replace(form, activation=None) for name, form in forms.items()}
        plan = QuantizationPlan(forms, HEAD in forms, 8 if int8_cache else None)
        fake_quant.insert(model, plan)
        scales = fake_quant.calibrate(model, [random_tokens(4, 48, seed=3)])
        model.config = config.with_quantization(plan.with_scales(scales))
    return model.eval()


def save(model: GPT, tokenizer: Tokenizer, folder: Path) -> Path:
    save_checkpoint(folder, model, tokenizer, "pretrain", Recipe())
    return folder


def write_unproven(
    model: GPT, tokenizer: Tokenizer, folder: Path, dtype: Literal["float32", "float16"] = "float32"
) -> OnnxModel:
    """Export a model without verifying the export."""
    checkpoint = load_checkpoint(save(model, tokenizer, folder / "checkpoint"))
    write(checkpoint, folder, ExportSettings(dtype=dtype))
    return OnnxModel(folder, threads=1)


def write_held_out(data: Path) -> Path:
    """Write a data folder that contains only held-out text."""
    data.mkdir()
    lines = [f"{n} turns of the chuck take {n * n % 97} strokes of the tool.\n" for n in range(40)]
    (data / "heldout.txt").write_text("".join(lines))
    return data


def quantization_change(
    model: GPT, exported: OnnxModel, prompts: list[list[int]], tokenizer: Tokenizer, at: Path
) -> float:
    """Mean change of the logits by quantization, to which export verification compares errors."""
    plain = GPT(model.config.with_quantization(None))
    weights = {k: v for k, v in model.state_dict().items() if k in plain.state_dict()}
    plain.load_state_dict(weights)
    return mean_difference(write_unproven(plain.eval(), tokenizer, at), exported, prompts)


def with_changed_metadata(folder: Path, at: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy an export to `at`, with its metadata modified by `change`."""
    at.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (at / file.name).write_bytes(file.read_bytes())
    metadata = json.loads((at / METADATA).read_text())
    change(metadata)
    (at / METADATA).write_text(json.dumps(metadata))
    return at
