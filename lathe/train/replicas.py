"""Data parallelism without sharding: every process has the same weights, and gradients are
averaged."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lathe.train.half_weights import HalfWeights
from lathe.train.local import local, placed_as

BUCKET_BYTES = 2**26
"""Bytes of a message: enough for the full bandwidth of a network, few enough that the last one,
which nothing hides, is short."""


class Replicas:
    """Averages gradients over the processes of a group. Each message of about `BUCKET_BYTES` is
    sent as soon as the last backward pass of a step has made its gradients, while that pass
    computes others, as by torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704).

    That one reduces the gradients of whatever its module's forward pass uses, in their own data
    type. Here, the loss uses the head outside of it, and with `HalfWeights` a weight's gradient is
    the float32 sum of those of its 16-bit copy.

    Args:
        weights: those that are trained, in the order of the forward pass.
        half_weights: their copies, which the passes compute with.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        half_weights: HalfWeights | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.half_weights, self.group = half_weights, group
        self._buckets: list[list[nn.Parameter]] = []
        size = BUCKET_BYTES
        for weight in reversed(weights):  # as the backward pass makes their gradients
            if size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(weight)
            size += local(weight).numel() * 4
        self._missing = [0] * len(self._buckets)
        self._sent: list[dist.Work] | None = None  # None: gradients are not complete yet
        for index, bucket in enumerate(self._buckets):
            for weight in bucket:
                leaf = half_weights.copy(weight) if half_weights else weight
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._counts_down(index)
                )

    def expect_last(self) -> None:
        """The next backward pass is the last one of the step."""
        self._missing, self._sent = [len(bucket) for bucket in self._buckets], []

    @torch.no_grad()
    def average(self) -> None:
        """Wait until all gradients are averaged; sends those that no pass of a step has made a
        last time, of a weight that it did not use."""
        self._sent = self._sent or []
        while len(self._sent) < len(self._buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent = None

    def _counts_down(self, index: int) -> Callable[[Tensor], None]:
        def made(_: Tensor) -> None:
            if self._sent is None:
                return
            self._missing[index] -= 1
            # In the same order in all processes, whichever gradients come first.
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send()

        return made

    @torch.no_grad()
    def _send(self) -> None:
        """Begin to average the next bucket, in place of its gradients."""
        assert self._sent is not None
        bucket = self._buckets[len(self._sent)]
        if self.half_weights is not None:
            self.half_weights.collect_gradients(bucket)
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flat = torch.cat([local(gradient).flatten() for gradient in gradients])
        parts = torch.split(flat, [local(gradient).numel() for gradient in gradients])
        for weight, gradient, part in zip(bucket, gradients, parts, strict=True):
            weight.grad = placed_as(gradient, part.view_as(local(gradient)))
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, self.group, async_op=True)
        assert work is not None
        self._sent.append(work)
