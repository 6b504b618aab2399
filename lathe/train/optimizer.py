"""AdamW with PaddleFleetX's parameter groups; norm and clipping of gradients under any parallel
layout."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lathe.model.architecture import Architecture
from lathe.train.local import local, placed_as
from lathe.train.loss_scale import LossScale
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


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, rate: float, skip: Tensor) -> None:
    """One step of AdamW at this learning rate, times the factor of each group.

    `optimizer.step` would compute with DTensors, whose every operation the host computes the layout
    of; AdamW treats each element alone, so this process's own ones suffice.

    Args:
        skip: () 1.0 if nothing may change, else 0.0.
    """
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if p.grad is not None and local(p).numel()]
        states = [optimizer.state[p] for p in held]
        if not held:
            continue
        adamw(
            [local(p) for p in held],
            [local(p.grad) for p in held],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            # Offloaded weights are on the CPU, which must wait for the value.
            found_inf=skip.to(held[0].device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=rate * group["lr_factor"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class DeviceLossScale:
    """The value of a `LossScale` on the device, which adapts it without the host: the next step is
    launched before the host knows whether this one has overflowed."""

    def __init__(self, scale: LossScale, device: torch.device) -> None:
        self._rule = scale
        self.value = torch.tensor(scale.value, device=device)
        self._good_steps = torch.tensor(scale.good_steps, device=device)
        self._overflows = torch.tensor(scale.overflows, device=device)

    def update(self, overflow: Tensor) -> None:
        """`LossScale.update` in tensors; `overflow` is () 1.0 or 0.0."""
        if not self._rule.adapts:
            return
        fails = overflow > 0
        self._good_steps = torch.where(fails, 0, self._good_steps + 1)
        self._overflows = self._overflows + fails
        grows = ~fails & (self._good_steps % self._rule.window == 0)
        shrinks = fails & (self._overflows >= self._rule.hysteresis)
        smaller = torch.where(shrinks, (self.value / 2).clamp(min=1.0), self.value)
        self.value = torch.where(grows, self.value * 2, smaller)
        self._overflows = torch.where(grows, 0, self._overflows)


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
            dist.all_reduce(local(self.table.grad), group=self.group)


@torch.no_grad()
def settle_partial(parameters: Sequence[nn.Parameter]) -> None:
    """Sum gradients for which each process of a mesh has only the contribution of its own tokens:
    those of norms and biases with sequence parallelism, in one message."""
    sums: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        gradient, weight = parameter.grad, parameter.data
        if not isinstance(gradient, DTensor) or not isinstance(weight, DTensor):
            continue
        if gradient.placements == weight.placements:
            continue
        pairs = zip(gradient.placements, weight.placements, strict=True)
        changed = [(dim, *pair) for dim, pair in enumerate(pairs) if pair[0] != pair[1]]
        dim, placement, wanted = changed[0]
        if len(changed) == 1 and placement.is_partial("sum") and wanted.is_replicate():
            sums[gradient.device_mesh.get_group(dim), gradient.dtype].append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=weight.placements)
    for (group, _), partial in sums.items():
        parts = [local(parameter.grad) for parameter in partial]
        flat = torch.cat([x.flatten() for x in parts])
        dist.all_reduce(flat, group=group)
        settled = torch.split(flat, [x.numel() for x in parts])
        for parameter, sum_ in zip(partial, settled, strict=True):
            weight = parameter.data
            parameter.grad = placed_as(weight, sum_.view_as(local(weight)))


@torch.no_grad()
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
        pieces[replicas // shards].append(local(gradient))
    total = torch.zeros((), device=device)
    for copies, tensors in pieces.items():
        norms = torch._foreach_norm([t for t in tensors if t.numel()], 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum().to(device) / copies
    return total


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients in place by a factor ()."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        # Those of offloaded weights are on the CPU, which must wait for the value.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
