"""One process of a group that does not exist: its collectives send nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from lathe.train.workers import Workers, make_mesh
from lathe_base.config.settings import Recipe

T = TypeVar("T")

GIVEN = (1.0, 1e4, 0.0, 0.0)
"""Made-up results of `Workers.sum`: a step's loss and squared gradient norm, so large that
gradients are clipped, and no requests to stop or save; in validation, the loss of one sample."""


class FakeWorkers(Workers):
    """Workers whose peers do not exist; values from them are made up."""

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        with unset_fake_temporarily():
            return torch.tensor(GIVEN[: len(values)])

    def agree(self, value: Callable[[], T]) -> T:
        return value()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass


class _Votes:
    """The stages of a pipeline vote before the first pass whether all know their shapes, which
    those of `lathe.train.passes` do: the result of torch's protocol is given, not received."""

    def __enter__(self) -> None:
        self._original = original = PipelineStage._warmup_backward_result

        def given(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
            result = original(stage, received_result)
            assert isinstance(result, FakeTensor)
            with unset_fake_temporarily():
                result.constant = torch.tensor([1], dtype=result.dtype)
            return result

        PipelineStage._warmup_backward_result = given  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        PipelineStage._warmup_backward_result = self._original  # type: ignore[method-assign]


@contextmanager
def join_fake_workers(recipe: Recipe, rank: int, size: int) -> Iterator[FakeWorkers]:
    """Act as process `rank` of `size`, alone.

    Raises:
        UserError: the recipe's degrees do not multiply to `size`.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        device = torch.device("cpu")
        mesh, replicas = make_mesh(recipe, device)
        with _Votes():
            yield FakeWorkers(rank, size, device, mesh, replicas, dist.new_group(backend="fake"))
    finally:
        dist.destroy_process_group()
