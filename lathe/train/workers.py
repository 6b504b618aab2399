"""This process's place among the data-parallel workers that torchrun started, if it did."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lathe.settings import GlobalSettings


@dataclass(frozen=True)
class Workers:
    """Rank and number of data-parallel workers, and the device that this one computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The average over all workers, on every worker."""
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def gather(self, value: Tensor) -> list[Tensor]:
        """Everyone's tensor of one shape, in rank order, on every worker."""
        if self.size == 1:
            return [value]
        gathered = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(gathered, value)
        return gathered

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_workers(settings: GlobalSettings) -> Iterator[Workers]:
    """Join the process group that torchrun's environment describes; alone without one."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    use_gpu = settings.device == "gpu" or (settings.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_gpu else "cpu"
    if use_gpu:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if use_gpu else "gloo")
    try:
        yield Workers(rank, size, torch.device(device))
    finally:
        if size > 1:
            dist.destroy_process_group()
