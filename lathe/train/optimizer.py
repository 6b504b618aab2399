"""AdamW with PaddleFleetX's parameter groups."""

from collections.abc import Iterable

import torch
from torch import nn

from lathe.model.architecture import Architecture
from lathe.train.schedule import PACT_LR_FACTOR, is_decayed
from lathe_base.config.settings import OptimizerSettings


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerSettings,
    architecture: Architecture,
) -> torch.optim.AdamW:
    """No weight decay on clipping bounds and, with `FusedAdamW`, on biases and norms; each group
    keeps its `lr_factor`.

    The moments are allocated at the start, as zeros.
    """
    decayed, plain, bounds = [], [], []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if name.endswith("alpha"):
            bounds.append(parameter)
        elif is_decayed(name, architecture, settings):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay, "lr_factor": 1.0},
        {"params": plain, "weight_decay": 0.0, "lr_factor": 1.0},
        {"params": bounds, "weight_decay": 0.0, "lr_factor": PACT_LR_FACTOR},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr.max_lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in (*decayed, *plain, *bounds):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_step(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Continue counting from this number of updates."""
    for values in optimizer.state.values():
        values["step"].fill_(updates)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]
