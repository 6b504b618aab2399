"""Models whose layers differ in width, or whose heads do not add up to the hidden size, as after
pruning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.gpt import GPT
from tests.support import small_export
from tests.support.families import make, save
from tests.support.small_export import PRUNED

Widths = dict[str, Any]
GROUPS: Widths = {"n_head": (4, 2, 2), "kv_heads": (2, 1, 1), "n_inner": (80, 33, 64)}
QUERIES: Widths = {"n_head": (2, 4, 1), "kv_heads": (2, 2, 1), "n_inner": (17, 80, 80)}
CASES: dict[str, tuple[str, Widths]] = {
    "gpt2": ("", {}),
    "llama": ("llama", GROUPS),
    "llama with biases, queries pruned": ("llama with biases, tied, llama3", QUERIES),
    "qwen3, queries pruned": ("qwen3", QUERIES),
    "gemma3": ("gemma3", {"n_head": (4, 2, 1), "kv_heads": (1, 1, 1), "n_inner": (80, 8, 80)}),
    "starcoder2": ("starcoder2", GROUPS),
    "opt": ("opt", {"n_head": (4, 1, 3), "n_inner": (80, 33, 64)}),
    "llama, a hidden size that heads do not divide": ("llama", {"n_embd": 45}),
}


def pruned(case: str, tokenizer: Tokenizer, folder: Path, **sizes: Any) -> Checkpoint:
    """A random model of a family in one of these shapes."""
    family, widths = CASES[case]
    if not family:
        return load_checkpoint(
            small_export.save(small_export.make_model(PRUNED), tokenizer, folder)
        )
    found = load_checkpoint(save(make(family, **sizes), folder / "whole", tokenizer))
    model = GPT(replace(found.model.config, **widths))
    model.initialize(0.2, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            parameter.copy_(parameter.half())  # exact in the float16 of quantized files
    return load_checkpoint(small_export.save(model.eval(), tokenizer, folder / "pruned"))
