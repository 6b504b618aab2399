"""Calibration text: training text, and text that the model writes itself.

Training data is often narrower than what the model will read: scales and weights rounded for novels
are worse for other text. What a pretrained model writes from an empty prompt is as varied as what
it was pretrained on.

Source: Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models"
(arXiv:2305.17888), for calibration as in Williams et al. 2024, "Self-calibration for Language Model
Quantization and Pruning" (arXiv:2410.17170).
"""

from collections.abc import Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor

from lathe.config.settings import GenerationSettings, Recipe
from lathe.data.tokens import TokenDataset
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.progress import bar
from lathe.train.batches import calibration_batches

CACHE_BYTES = 2**30
"""Upper bound of the key-value cache while text is generated: rows that fit are generated together,
since on a CPU a step of many rows takes little longer than one of a few."""


def calibration_text(recipe: Recipe, model: GPT, data: TokenDataset, end: int) -> list[Tensor]:
    """Micro-batches (B, T) on the CPU: `Sensitivity.calibration_batches` of training text and, for
    static scales and GPTQ, `Sensitivity.generated_batches` that the model writes. They take turns,
    so that the first few have both.

    Args:
        model: in float.
        end: the end-of-document token, with which every generated row begins.
    """
    read = [torch.from_numpy(tokens) for tokens in calibration_batches(recipe, data)]
    rows, length = read[0].shape
    settings, seed = recipe.Compress.Quantization, recipe.Global.seed
    # On SmolLM2-135M dynamic INT8 costs 0.0041 nats per token with and without generated text.
    may_be_static = settings.activation_quantize_type in {"auto", "moving_average_abs_max"}
    pays = may_be_static or settings.uses_gptq(recipe.Engine.max_steps)
    count = recipe.Sensitivity.generated_batches if pays else 0
    written: Sequence[Tensor] = ()
    if count:
        written = torch.split(generated_text(model, count * rows, length, end, seed), rows)
    both = chain.from_iterable(zip_longest(read, written))
    return [tokens for tokens in both if tokens is not None]


def generated_text(model: GPT, rows: int, length: int, end: int, seed: int) -> Tensor:
    """Text (rows, length) drawn from a model's distribution, each row beginning with `end`."""
    sampling = GenerationSettings(temperature=1.0, top_k=0, top_p=1.0, max_dec_len=length - 1)
    config = model.config
    row_bytes = 8 * length * config.head_dim * sum(config.n_kv_head)  # float32 keys and values
    at_once = max(1, CACHE_BYTES // row_bytes)
    sizes = [min(at_once, rows - first) for first in range(0, rows, at_once)]
    found = []
    with bar("generate calibration text", len(sizes) * (length - 1)) as progress:
        for number, size in enumerate(sizes):
            found += generate(
                model, [[end]] * size, sampling, seed=seed + number, progress=progress
            )
    return torch.tensor([[end, *row] for row in found])
