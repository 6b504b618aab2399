"""Plants massive activations in a model: for a few tokens, the activation of one FFN channel is
thousands of times larger than all others, as in pretrained models. The outputs stay the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from tests.support import families
from tests.support.small_export import UNIFORM, make_model

MASSIVE = (18, 22)  # digits 3 and 7 in the byte tokenizer; held-out text and prompts have them
SCALE = 3000.0

FLAG = 12.0  # first hidden feature of the massive tokens; 0 for all other tokens
GAIN = 8.0  # large enough to open the channel for massive tokens and close it for others
READ = 0.002  # standard deviation of the channel's output weights, times `scale`


def gpt2(folder: Path, tokenizer: Tokenizer) -> GPT:
    """Make a GPT-2 with random weights; the arguments are only needed by `llama`."""
    return make_model(UNIFORM)


def llama(folder: Path, tokenizer: Tokenizer) -> GPT:
    hf = families.make("llama", head_dim=16)
    return load_checkpoint(families.save(hf, folder / "hf", tokenizer)).model.eval()


@torch.no_grad()
def plant(model: GPT, tokens: Sequence[int], scale: float, layer: int = 1) -> GPT:
    """Make the first FFN channel of a layer about 20 times `scale` for `tokens`, in place.

    The first hidden feature becomes a flag of these tokens that nothing else writes. The channel
    reads the flag, and its output weights are divided by `scale`, so that models that differ only
    in `scale` compute the same up to rounding.
    """
    family = model.config.architecture
    table = model.embedding.weight
    table[:, 0] = 0.0
    table[list(tokens), 0] = FLAG
    for name in family.embeddings[1:]:
        model.get_parameter(f"{name}.weight")[:, 0] = 0.0
    for i in range(model.config.n_layer):
        for units in ("heads", "channels"):
            row: Any = model.get_submodule(f"{family.block(i)}.{family.row(units).name}")
            row.weight[0] = 0.0
            if row.bias is not None:
                row.bias[0] = 0.0
    block = family.block(layer)
    norm: Any = model.get_submodule(f"{block}.{family.block_norms[1]}")
    norm.weight[0] = 1.0
    column: Any
    readers: Any
    column, readers = (
        model.get_submodule(f"{block}.{linear.name}")
        for linear in model.config.unit_linears("channels")
    )
    column.weight[:2, 0] = 0.0
    if family.gated:  # rows: gate and up projection; exactly 0 for other tokens
        column.weight[:2] = 0.0
        column.weight[0, 0], column.weight[1, 0] = GAIN, scale
    else:  # GELU is linear far above 0, and 0 far below
        norm.bias[0] = 0.0
        column.weight[0] = 0.0
        column.weight[0, 0], column.bias[0] = GAIN * scale, -1.5 * GAIN * scale
    generator = torch.Generator().manual_seed(5)
    readers.weight[1:, 0] = READ / scale * torch.randn(len(readers.weight) - 1, generator=generator)
    return model


@torch.no_grad()
def plant_at_start(model: GPT, scale: float) -> GPT:
    """Apply `plant` to position 0, whatever its token, of a model with learned positions.

    Position embeddings are otherwise zero and attention is weak, so that prepending a token hardly
    changes the outputs.
    """
    plant(model, (), scale)
    family = model.config.architecture
    positions: Any = model.get_submodule(family.embeddings[1])
    positions.weight.zero_()
    positions.weight[0, 0] = FLAG
    for i in range(model.config.n_layer):
        model.get_parameter(f"{family.block(i)}.{family.row('heads').name}.weight").mul_(0.01)
    return model


def massive_reader(model: GPT) -> str:
    """Name of the linear in layer 1 that reads the planted activations."""
    family = model.config.architecture
    return f"{family.block(1)}.{family.row('channels').name}"
