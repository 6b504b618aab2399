"""Text that a model writes itself, for GPTQ to read beside training text.

Training data is often narrower than what the model will read, and weights rounded for novels are
worse for other text. What a pretrained model writes from an empty prompt is as varied as what it
was pretrained on.

Source: Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models"
(arXiv:2305.17888); for GPTQ, Williams et al. 2024, "Self-calibration for Language Model
Quantization and Pruning" (arXiv:2410.17170).
"""

import torch
from torch import Tensor

from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe_base.config.settings import GenerationSettings
from lathe_base.progress import bar

CACHE_BYTES = 2**30
"""Upper bound of the key-value cache: rows that fit are generated together, since on a CPU a step
of many rows takes little longer than one of a few."""


def generated_text(model: GPT, rows: int, length: int, end: int, seed: int) -> Tensor:
    """Tokens (rows, length) on the CPU, drawn from the distribution of a float model.

    Args:
        end: the end-of-document token, with which every row begins.
    """
    sampling = GenerationSettings(temperature=1.0, top_k=0, top_p=1.0, max_dec_len=length - 1)
    config = model.config
    row_bytes = 8 * length * config.head_dim * sum(config.n_kv_head)  # float32 keys and values
    at_once = max(1, CACHE_BYTES // row_bytes)
    sizes = [min(at_once, rows - first) for first in range(0, rows, at_once)]
    found = []
    with bar("generate text for GPTQ", len(sizes) * (length - 1)) as progress:
        for number, size in enumerate(sizes):
            found += generate(
                model, [[end]] * size, sampling, seed=seed + number, progress=progress
            )
    return torch.tensor([[end, *row] for row in found])
