"""Repeats the passes of a pipeline stage for further micro-batches instead of running them.

A pass in fake tensors takes as long as one of a small model. A pipeline needs as many
micro-batches as stages, and each does what the one before did once the first two have made the
gradients and the caches. So the passes of the first three run, the second and third must have made
the same allocations, operations and collectives, and the others are recorded as another third. The
schedule of the pipeline and its messages run for every micro-batch, and so do the passes of a last
stage, which frees what its loss has made.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lathe.plan.record import Allocation, Collective, Recorder

RUN = 3
"""Number of micro-batches whose passes run."""

OUTPUT, INPUT_GRADIENT = -1, -2
"""Names of the storages that the schedule gets from a pass: what the forward pass returns and the
backward pass. Those of its own are counted from 0."""


class Unsteady(Exception):
    """Two passes that should be the same differ."""


def is_unsteady(error: BaseException | None) -> bool:
    """Whether an error, which torch's schedules wrap, is `Unsteady`."""
    while error is not None and not isinstance(error, Unsteady):
        error = error.__cause__
    return error is not None


@dataclass(frozen=True)
class _Half:
    """Effects of a forward or backward pass.

    Attributes:
        changes: name of a storage, and the bytes that it grows.
        kinds: categories of the new storages, by name.
        outside: changes of storages that were there before, by the recorder's key.
    """

    changes: list[tuple[int, int]]
    kinds: dict[int, str]
    outside: list[Allocation]
    collectives: list[Collective]
    flops: int
    operations: int


class Repeats:
    """Replaces the `forward` of a stage other than the last."""

    def __init__(self, forward: Callable[[Tensor], Tensor], recorder: Recorder) -> None:
        self.run, self.recorder = forward, recorder
        self.forwards: list[_Half] = []
        self.backwards: list[_Half] = []
        self.count = 0
        self.like: Tensor | None = None  # the output
        self.anchor = torch.empty(0, requires_grad=True)  # ids have no gradient

    def __call__(self, x: Tensor) -> Tensor:
        """Run the stage, or repeat it.

        Raises:
            Unsteady: the stage cannot be repeated.
        """
        # Validation has too few micro-batches to repeat.
        if not torch.is_grad_enabled():
            return self.run(x)
        self.count += 1
        if self.count <= RUN:
            return self._watch(x)
        y: Tensor = _Repeat.apply(self.anchor, x, self)  # type: ignore[no-untyped-call]
        return y

    def _watch(self, x: Tensor) -> Tensor:
        names: dict[int, int] = {}
        end_of_forward = self._begin(names)
        y = self.run(x)
        names[self.recorder.key(y)] = OUTPUT
        forward = end_of_forward()
        self.forwards.append(forward)
        self.like = torch.empty_like(y, device="meta")

        def begin_backward(_: Tensor) -> None:
            end_of_backward = self._begin(names)

            def end() -> None:
                if x.grad is not None:
                    names[self.recorder.key(x.grad)] = INPUT_GRADIENT
                backward = end_of_backward()
                # What is left are the gradients of 16-bit copies, which are freed as soon as they
                # have been added to those in float32.
                left = Counter[int]()
                for name, size in (*forward.changes, *backward.changes):
                    left[name] += size
                freed = ((name, -size) for name, size in left.items() if name >= 0 and size)
                backward.changes.extend(freed)
                self.backwards.append(backward)

            # It runs when the whole backward pass has ended, and the input has its gradient.
            torch.autograd.Variable._execution_engine.queue_callback(end)

        y.register_hook(begin_backward)  # type: ignore[no-untyped-call]
        return y

    def _begin(self, names: dict[int, int]) -> Callable[[], _Half]:
        """Start to watch; what is returned ends it.

        Args:
            names: by key, of the pass's storages; takes up the new ones.
        """
        seen = self.recorder
        first, calls, key = len(seen.allocations), len(seen.collectives), len(seen.kinds)
        flops, operations = seen.flops.get(seen.phase, 0), seen.operations.get(seen.phase, 0)

        def end() -> _Half:
            n_named = sum(name >= 0 for name in names.values())
            for new in range(key, len(seen.kinds)):
                if new not in names:
                    names[new] = n_named
                    n_named += 1
            changes = seen.allocations[first:]
            return _Half(
                [(names[c.key], c.size) for c in changes if c.key in names],
                {names[new]: seen.kinds[new] for new in range(key, len(seen.kinds))},
                [c for c in changes if c.key not in names],
                seen.collectives[calls:],
                seen.flops.get(seen.phase, 0) - flops,
                seen.operations.get(seen.phase, 0) - operations,
            )

        return end

    def steady(self, halves: list[_Half]) -> _Half:
        """The pass to repeat."""
        # The second and third must agree, and must not touch what was there before.
        if halves[RUN - 2] != halves[RUN - 1] or halves[RUN - 1].outside:
            raise Unsteady
        return halves[RUN - 1]

    def repeat(
        self, half: _Half, keys: dict[int, int], shared: Mapping[int, Callable[[int], object]]
    ) -> None:
        """Record a pass.

        Args:
            keys: the recorder's of the pass's own storages, by name; takes up new ones.
            shared: what to do when a storage that the schedule knows changes by so many bytes.
        """
        seen = self.recorder
        for name, size in half.changes:
            if name < 0:
                shared[name](size)
                continue
            if name not in keys:
                keys[name] = len(seen.kinds)
                seen.kinds.append(half.kinds[name])
            seen.allocations.append(Allocation(keys[name], size))
        seen.collectives += half.collectives
        seen.flops[seen.phase] = seen.flops.get(seen.phase, 0) + half.flops
        seen.operations[seen.phase] = seen.operations.get(seen.phase, 0) + half.operations


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, repeats: Repeats) -> Tensor:
        half, like = repeats.steady(repeats.forwards), repeats.like
        assert like is not None
        made: list[Tensor] = []

        def make(size: int) -> None:
            if size > 0:
                made.append(torch.empty_like(like, device=x.device))
                repeats.recorder.categorize(made, half.kinds[OUTPUT])

        ctx.repeats, ctx.keys = repeats, {}
        ctx.shape, ctx.dtype = x.shape, x.dtype
        repeats.repeat(half, ctx.keys, {OUTPUT: make})
        return made[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        repeats: Repeats = ctx.repeats
        half = repeats.steady(repeats.backwards)
        made: list[Tensor] = []

        def make(size: int) -> None:
            if size > 0:
                made.append(gradient.new_empty(ctx.shape, dtype=ctx.dtype))
                repeats.recorder.categorize(made, half.kinds[INPUT_GRADIENT])

        shared = {OUTPUT: lambda size: None, INPUT_GRADIENT: make}
        repeats.repeat(half, ctx.keys, shared)
        return None, made[0] if made else None, None
