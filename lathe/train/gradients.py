"""Global norm and clipping of gradients under any parallel layout."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lathe.train.parallel import Stage
from lathe.train.workers import Workers


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
