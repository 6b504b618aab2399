"""Refuse a model that does not fit this machine's memory before anything is allocated."""

import os
from dataclasses import replace

import torch

from lathe.model.config import GPTConfig
from lathe.train.layout import wanted_layout
from lathe.train.memory import estimate
from lathe.train.workers import choose_device
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_launch.memory import machine_memory

SAMPLE, TOKEN = 12, 8  # bytes


def require_capacity(config: GPTConfig, recipe: Recipe) -> None:
    """Check that weights, gradients and optimizer state fit one device.

    Uses the planner's estimate of this process's share; activations are not counted, as
    recomputation and micro-batches of one can make them small.

    Raises:
        UserError: they exceed the device's total memory; see also `wanted_layout`.
    """
    layout = wanted_layout(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    if layout.pp * layout.virtual_pp > config.n_layer:
        return  # an impossible pipeline, which is reported elsewhere
    leanest = replace(layout, micro_batch=1, recompute="full")
    memory = estimate(config, recipe, leanest)
    needed = memory.weights + memory.gradients + memory.optimizer
    device = choose_device(recipe)
    available = available_memory(device)
    if needed > available:
        shape = {
            "hidden_size": config.n_embd,
            "num_layers": config.n_layer,
            "ffn_hidden_size": max(config.n_inner),
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.n_positions,
        }
        sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
        where = "the GPU has" if device.type == "cuda" else "this machine has"
        raise UserError(
            f"Model ({sizes}) takes {needed / 1e9:,.0f} GB per process for weights, gradients and "
            f"optimizer state, but {where} {available / 1e9:,.0f} GB",
            "lower Model.hidden_size or num_layers, or use parallelism: see `lathe plan`",
            Code.OUT_OF_MEMORY,
        )


def require_batches(recipe: Recipe, batch: int) -> None:
    """Check that the order of samples and the tokens of a step fit this machine's memory.

    Args:
        batch: sequences of a step.

    Raises:
        UserError: they exceed its memory.
    """
    samples, length = recipe.Engine.max_steps * batch, recipe.Data.Train.dataset.max_seq_len
    needed, available = (
        SAMPLE * samples + TOKEN * batch * length,
        available_memory(torch.device("cpu")),
    )
    if needed > available:
        raise UserError(
            f"Engine.max_steps {recipe.Engine.max_steps:,} of {batch:,} sequences take "
            f"{needed / 1e9:,.0f} GB for sample order and tokens, but this machine has "
            f"{available / 1e9:,.0f} GB",
            "lower Engine.max_steps or Global.global_batch_size (local_batch_size)",
            Code.OUT_OF_MEMORY,
        )


def available_memory(device: torch.device) -> int:
    """Memory in bytes of a GPU, or of this machine as far as the process's cgroups allow."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory()
