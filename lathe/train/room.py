"""The device of a part of the work that divides no model among processes: calibration, rounding,
scores, evaluation. It is the GPU, if that has room, and otherwise the CPU; the log says which, and
why.

Memory is estimated from the model's shape. Tests compare the estimates with the tensors of a pass;
none has been compared with a GPU's memory yet.
"""

import logging
import os
from collections.abc import Mapping

import torch

from lathe.model.gpt import GPT
from lathe.train.loss import CHUNK_ELEMENTS
from lathe_base.config.settings import Recipe

log = logging.getLogger("lathe")

WHOLE, BY_BLOCK = "the whole model", "one block after the other"
"""Where weights are: all on the device, or as in `lathe.model.by_block`."""

WEIGHT_COPIES = 4
"""Memory for the largest block or table, in multiples of its weights: itself, its rounded weights,
their gradients and what rounding holds meanwhile."""
ROOM_FOR_KERNELS = 2**30
"""Bytes for the workspaces of libraries, and for holes between tensors."""


def device_with_room(
    recipe: Recipe, device: torch.device, part: str, needs: Mapping[str, int]
) -> tuple[torch.device, str]:
    """The device for a part of the work, and the first way to do it there that fits; the CPU, and
    the last way, if none does. Logs the choice.

    Args:
        device: this process's.
        part: its name in the log.
        needs: bytes by way (`WHOLE`, `BY_BLOCK`), the preferred one first.
    """
    *_, last = needs
    if device.type == "cpu":
        reason = "Global.device is cpu" if recipe.Global.device == "cpu" else "no GPU"
        _say(logging.INFO, f"{part}: on the CPU ({reason})")
        return device, last
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps of tensors that are gone is free for new ones, too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    for way, needed in needs.items():
        size = f"needs about {(needed + ROOM_FOR_KERNELS) / 1e9:.1f} GB"
        if needed + ROOM_FOR_KERNELS <= free:
            words = f"{part}: on {device}, {way} ({size}, {free / 1e9:.1f} GB are free)"
            _say(logging.INFO, words)
            return device, way
    words = f"{part}: on the CPU, because {last} {size}, and {device} has {free / 1e9:.1f} GB free"
    _say(logging.WARNING, words)
    return torch.device("cpu"), last


def _say(level: int, words: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the first process speaks for all
        log.log(level, "%s", words)


def pass_bytes(model: GPT, tokens: int, gradients: bool = False) -> int:
    """Memory that passes by block need on the device, in bytes.

    Args:
        tokens: those of a batch.
        gradients: whether there is a backward pass, for which a block keeps what it computes.
    """
    tables = [model.get_submodule(name) for name in model.config.architecture.embeddings]
    tables = [*dict.fromkeys([*tables, model.output])]
    sizes: list[int] = [
        sum(p.nbytes for p in part.parameters()) for part in (*model.blocks, *tables)
    ]
    weights = sum(sizes[len(model.blocks) :]) + WEIGHT_COPIES * max(sizes)
    return weights + _activation_bytes(model, tokens, 5 if gradients else 2)


def whole_bytes(model: GPT, tokens: int) -> int:
    """Memory that a forward pass of the whole model needs on the device, in bytes.

    Args:
        tokens: those of a batch.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    copies = 1 if model.config.quantization is None else 2  # fake quantization keeps rounded ones
    return copies * weights + _activation_bytes(model, tokens, 2)


def _activation_bytes(model: GPT, tokens: int, copies: int) -> int:
    """Bytes of a block's activations, and of logits, for the tokens of a batch."""
    config = model.config
    outputs = [
        sum(config.linear_shape(linear, layer)[1] for linear in config.architecture.linears)
        for layer in range(config.n_layer)
    ]
    logits = min(32 * tokens * config.vocab_size, 16 * CHUNK_ELEMENTS)
    widest: int = config.n_embd + max(outputs)
    return 4 * copies * tokens * widest + logits
