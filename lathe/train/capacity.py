"""Refuse a model that this machine cannot hold, before anything of it is allocated."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from lathe.config.settings import Recipe
from lathe.errors import UserError
from lathe.model.config import GPTConfig
from lathe.train.layout import wanted_layout
from lathe.train.memory import estimate
from lathe.train.workers import choose_device

CGROUP = Path("/sys/fs/cgroup")
PROCESS = 128e6  # bytes: less than torch itself takes of its own
SAMPLE, TOKEN = 12, 8  # bytes
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2 and v1


def require_capacity(config: GPTConfig, recipe: Recipe) -> None:
    """Let a training start whose weights, gradients and optimizer state one device can hold.

    They are the planner's estimate of this process's part, where recomputation and micro-batches
    of one leave little else; activations do not count.

    Raises:
        UserError: they are larger than the device's whole memory; see also `wanted_layout`.
    """
    layout = wanted_layout(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    if layout.pp * layout.virtual_pp > config.n_layer:
        return  # there is no such pipeline, and nothing to estimate
    leanest = replace(layout, micro_batch=1, recompute="full")
    memory = estimate(config, recipe, leanest)
    needed = memory.weights + memory.gradients + memory.optimizer
    device = choose_device(recipe.Global.device)
    held = memory_of(device)
    if needed > held:
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
            f"Model ({sizes}) takes {needed / 1e9:,.0f} GB a process for weights, gradients and "
            f"optimizer state, and {where} {held / 1e9:,.0f} GB",
            "lower Model.hidden_size or num_layers, or divide the model: `lathe plan` shows how",
        )


def require_batches(recipe: Recipe, batch: int) -> None:
    """Let a training start whose order of samples, and tokens of a step, this machine can hold.

    Args:
        batch: sequences of a step.

    Raises:
        UserError: they are larger than its memory.
    """
    samples, length = recipe.Engine.max_steps * batch, recipe.Data.Train.dataset.max_seq_len
    needed, held = SAMPLE * samples + TOKEN * batch * length, memory_of(torch.device("cpu"))
    if needed > held:
        raise UserError(
            f"Engine.max_steps {recipe.Engine.max_steps:,} of {batch:,} sequences take "
            f"{needed / 1e9:,.0f} GB for their order and tokens, and this machine has "
            f"{held / 1e9:,.0f} GB",
            "lower Engine.max_steps or Global.global_batch_size (local_batch_size)",
        )


def require_processes(count: int) -> None:
    """Let so many training processes start on this machine.

    Raises:
        UserError: torch alone would fill its memory.
    """
    held = memory_of(torch.device("cpu"))
    if count * PROCESS > held:
        raise UserError(
            f"Distributed asks for {count} processes on this machine, which has {held / 1e9:,.0f} "
            f"GB: at most {held // PROCESS:.0f} have room, without a model",
            "lower the degrees, or divide the processes over machines by Launch.nodes",
        )


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU, or those of this machine that the process's cgroups let it have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def cgroup_limits(root: Path = CGROUP, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes that the process's cgroup, and each that it is in, allow."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield from _limits_of(folder)


def _limits_of(folder: Path) -> Iterator[int]:
    for name in LIMITS:
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():  # else "max"
            yield int(text)
