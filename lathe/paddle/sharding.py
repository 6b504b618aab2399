"""Gradients and moments divided over processes, of which each updates a part of the weights.

ZeRO stage 2 (Rajbhandari et al. 2020) by `reduce` and `broadcast` alone. Paddle's own
`group_sharded_parallel` refuses CPUs, and lets nobody see the gradients before it scales them.
"""

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from lathe.paddle.workers import Workers


class GradientSums:
    """Sums of the gradients of `parameters` over the processes that see other parts of a batch.

    With sharding the sum of a parameter is its owner's alone; the others drop their gradient as
    soon as backward has made it. It may be made in several backward passes.

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
        """Call it after the last backward pass of a step."""
        workers = self.workers
        if workers.data_size > workers.sharding:
            _all_reduce([p.grad for p in self.owned if p.grad is not None], workers.replicas)

    @paddle.no_grad()
    def publish(self) -> None:
        """Give the weights that this process has updated to those that have not."""
        if self.workers.sharding > 1:
            for parameter, owner in self._owners():
                dist.broadcast(parameter, self.group.ranks[owner], self.group)

    def _owners(self) -> Any:
        return zip(self.parameters, self.owner, strict=True)

    def _reduce(self, parameter: Tensor, owner: int) -> Any:
        @paddle.no_grad()
        def reduce(*_: Any) -> None:
            # The owner's holds the sum of earlier passes already, the others' only this one's.
            dist.reduce(parameter.grad, self.group.ranks[owner], group=self.group)
            if owner != self.workers.sharding_rank:
                parameter.clear_gradient(False)

        return reduce


def assign(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of every parameter, so that all parts have about as many numbers."""
    held, owner = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[index] = held.index(min(held))
        held[owner[index]] += sizes[index]
    return owner


@paddle.no_grad()
def _all_reduce(gradients: Sequence[Tensor], group: Any) -> None:
    """In place, in one message."""
    flat = paddle.concat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = paddle.split(flat, [gradient.size for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.set_value(part.reshape(gradient.shape))
