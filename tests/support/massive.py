"""Massive activations in a model of either family: a few tokens whose activation in one FFN channel
is thousands of times the others', as in pretrained models, while the function stays what it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from tests.support import families
from tests.support.small_export import UNIFORM, make_model

MASSIVE = (18, 22)  # the digits 3 and 7 of the byte tokenizer, which held-out text and prompts have
SCALE = 3000.0

FLAG = 12.0  # in the first hidden feature, of the tokens that are massive; all others have 0 there
GAIN = 8.0  # so that the channel is open for these tokens, and shut for all others
READ = 0.002  # what its readers make of it


def gpt2(folder: Path, tokenizer: Tokenizer) -> GPT:
    """A model of random weights; `llama` needs the arguments."""
    return make_model(UNIFORM)


def llama(folder: Path, tokenizer: Tokenizer) -> GPT:
    hf = families.make("llama", head_dim=16)
    return load_checkpoint(families.save(hf, folder / "hf", tokenizer)).model.eval()


@torch.no_grad()
def plant(model: GPT, tokens: Sequence[int], scale: float, layer: int = 1) -> GPT:
    """Make the first FFN channel of a layer large for `tokens`, in place: about 20 times `scale`.

    The first hidden feature becomes a flag that these tokens have, and nothing else writes to. The
    channel reads it; its readers are divided by `scale`, so that models that differ in `scale`
    compute the same up to rounding.
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
        for linear in model.config.linears_of("channels")
    )
    column.weight[:2, 0] = 0.0
    if family.gated:  # rows are a channel's gate and its factor; others' flag is exactly 0
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
    """`plant` for the token at position 0, whatever it is, of a model with learned positions.

    Positions mean nothing else, and attention little, so that one more token at the beginning
    leaves the function nearly as it was.
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
    """The linear of layer 1 that reads the planted activations."""
    family = model.config.architecture
    return f"{family.block(1)}.{family.row('channels').name}"
