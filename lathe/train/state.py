"""What a killed run needs to go on to the same bits: one folder a saved step, committed by rename.

`state/step_00000200/` holds `model.safetensors` (weights and buffers), `optimizer.safetensors`,
`rng.safetensors` (one generator state a worker) and `trainer.json`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lathe.storage import atomic_folder

STEP = re.compile(r"step_(\d{8})")


def saved_steps(folder: Path) -> list[Path]:
    """Committed states, oldest first; a half-written one does not have the name of one."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


def save_state(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: list[Tensor],
    extra: dict[str, Any],
    keep: int,
) -> None:
    """Write `folder/step_N` and drop all but the newest `keep`.

    Args:
        generators: every worker's RNG state, uint8, in rank order.
        extra: JSON values to give back on load.
    """
    with atomic_folder(folder / f"step_{step:08d}", "trainer.json") as work:
        save_file(_contiguous(model.state_dict()), work / "model.safetensors")
        moments = {
            f"{index}.{key}": value
            for index, values in optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        save_file(_contiguous(moments), work / "optimizer.safetensors")
        save_file({str(i): g for i, g in enumerate(generators)}, work / "rng.safetensors")
        (work / "trainer.json").write_text(json.dumps({"step": step, **extra}))
    for old in saved_steps(folder)[:-keep]:
        shutil.rmtree(old)


def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Tensor], dict[str, Any]]:
    """Restore model and optimizer in place; returns the RNG states and `extra` with `step`."""
    model.load_state_dict(load_file(path / "model.safetensors"))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(path / "optimizer.safetensors").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    rng = load_file(path / "rng.safetensors")
    extra: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    return [rng[str(i)] for i in range(len(rng))], extra


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
