"""AdamW with PaddleFleetX's parameter groups; norm and clipping of gradients under any parallel
layout."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lathe.model.architecture import Architecture
from lathe.train.parallel import Stage
from lathe.train.schedule import PACT_LR_FACTOR, is_decayed
from lathe.train.workers import Workers
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


class TiedEmbedding:
    """Sum the gradients of the tied embedding, which the first and last pipeline stage share."""

    def __init__(self, stages: Sequence[Stage], workers: Workers) -> None:
        self.group: dist.ProcessGroup | None = None
        self.table: Tensor | None = None
        self.is_second_copy = False
        tied = stages[0].gpt.config.tie_word_embeddings
        if workers.mesh["pp"].size() == 1 or not tied:
            return
        first, last = workers.mesh.mesh[0].flatten(), workers.mesh.mesh[-1].flatten()
        for ends in zip(first.tolist(), last.tolist(), strict=True):
            group = dist.new_group(list(ends))
            if workers.rank in ends:
                self.group = group
                self.is_second_copy = stages[-1].is_last
                end = stages[-1] if self.is_second_copy else stages[0]
                self.table = end.gpt.output.weight

    def settle(self) -> None:
        """Replace the gradients of both copies by their sum."""
        if self.table is not None and self.table.grad is not None:
            dist.all_reduce(_local(self.table.grad), group=self.group)


def settle_partial(parameters: Sequence[nn.Parameter]) -> None:
    """Sum gradients for which each process of a mesh has only the contribution of its own
    tokens."""
    for parameter in parameters:
        gradient, weight = parameter.grad, parameter.data
        if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
            parameter.grad = gradient.redistribute(placements=weight.placements)


def squared_norm(parameters: Sequence[nn.Parameter], replicas: int, device: torch.device) -> Tensor:
    """This process's share of the squared global gradient norm, () float32; the shares of all
    processes add up to it.

    Args:
        replicas: processes that hold the same layers; a gradient held by k of them counts 1/k.
    """
    pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        shards = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        # By the number of processes that hold the same values, so that each counts once.
        pieces[replicas // shards].append(_local(gradient))
    total = torch.zeros((), device=device)
    for copies, tensors in pieces.items():
        norms = torch._foreach_norm([t for t in tensors if t.numel()], 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum().to(device) / copies
    return total


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
