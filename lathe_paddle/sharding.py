"""Gradients and moments are divided over processes, each of which updates a part of the weights.

This is ZeRO stage 2 (Rajbhandari et al. 2020), with `reduce` and `broadcast` only. Paddle's own
`group_sharded_parallel` refuses CPUs, and does not expose the gradients before it scales them.
"""

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from lathe_paddle.workers import Workers


class GradientSums:
    """Sums the gradients of `parameters` over the processes that see different parts of a batch.

    With sharding, only the owner of a parameter keeps the sum; the others drop their gradient as
    soon as the backward pass has made it. A step may have several backward passes.

    Attributes:
        owned: the parameters that this process updates.
    """

    def __init__(self, parameters: Sequence[Tensor], workers: Workers) -> None:
        self.parameters, self.workers = parameters, workers
        self.owner = assign([int(p.size) for p in parameters], workers.sharding)
        self.owned = [p for p, o in self._owners() if o == workers.sharding_rank]
        if workers.sharding > 1:
            self.group = workers.shards
            for parameter, owner in self._owners():
                parameter._register_backward_hook(self._reduce(parameter, owner))

    def sum(self) -> None:
        """Complete the sums; call it after the last backward pass of a step."""
        workers = self.workers
        if workers.data_size > workers.sharding:
            _all_reduce([p.grad for p in self.owned if p.grad is not None], workers.replicas)

    @paddle.no_grad()
    def publish(self) -> None:
        """Broadcast the weights that each process has updated to the others."""
        if self.workers.sharding > 1:
            for parameter, owner in self._owners():
                dist.broadcast(parameter, self.group.ranks[owner], self.group)

    def _owners(self) -> Any:
        return zip(self.parameters, self.owner, strict=True)

    def _reduce(self, parameter: Tensor, owner: int) -> Any:
        @paddle.no_grad()
        def reduce(*_: Any) -> None:
            # The owner's gradient already has the sum of earlier passes, the others' only this one.
            dist.reduce(parameter.grad, self.group.ranks[owner], group=self.group)
            if owner != self.workers.sharding_rank:
                parameter.clear_gradient(False)

        return reduce


def assign(sizes: Sequence[int], parts: int) -> list[int]:
    """The part that owns each parameter, such that all parts have about the same size."""
    held, owner = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[index] = held.index(min(held))
        held[owner[index]] += sizes[index]
    return owner


@paddle.no_grad()
def _all_reduce(gradients: Sequence[Tensor], group: Any) -> None:
    """Sum in place, in one message."""
    flat = paddle.concat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = paddle.split(flat, [gradient.size for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.set_value(part.reshape(gradient.shape))
