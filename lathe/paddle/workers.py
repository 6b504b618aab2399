"""This process's place among those that `paddle.distributed.launch` started, if it did."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from lathe.errors import UserError
from lathe.paddle.supported import require_no_gpu_needed
from lathe.settings import DistributedSettings, Recipe

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Workers:
    """Attributes:
    rank, size: of all processes.
    data_rank, data_size: of the parts into which a global batch is divided, along `dp` and
        `sharding`.
    groups: of Paddle's topology; None where all processes hold the same.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    groups: Any = None

    @property
    def mp(self) -> int:
        """Processes over which every block linear is divided."""
        return self.groups.get_model_parallel_world_size() if self.groups else 1

    @property
    def mp_rank(self) -> int:
        return self.groups.get_model_parallel_rank() if self.groups else 0

    @property
    def sharding(self) -> int:
        """Processes over which gradients and moments are divided."""
        return self.groups.get_sharding_parallel_world_size() if self.groups else 1

    @property
    def sharding_rank(self) -> int:
        return self.groups.get_sharding_parallel_rank() if self.groups else 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_replica(self) -> bool:
        """Whether another process, earlier along `dp`, holds the same."""
        return self.data_rank != self.sharding_rank

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, values: list[float]) -> list[float]:
        """Over all processes."""
        if self.size == 1:
            return values
        tensor = paddle.to_tensor(values, dtype="float64")
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.numpy()]

    def gather(self, value: Any) -> list[Any]:
        """Every process's, by rank. It travels as a pickle, between our processes."""
        if self.size == 1:
            return [value]
        found: list[Any] = []
        dist.all_gather_object(found, value)
        return found


@contextmanager
def join_workers(recipe: Recipe) -> Iterator[Workers]:
    """Join the group that the launcher's environment describes; a group of one without it.

    Raises:
        UserError: the recipe's degrees do not multiply to the number of processes, or ask for what
            Paddle refuses on this device.
    """
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
    dp, mp, sharding = degrees(recipe.Distributed, size)
    paddle.set_device(choose_device(recipe.Global.device))
    require_device(recipe)
    if size == 1:
        yield Workers()
        return
    if mp == sharding == 1:
        dist.init_parallel_env()
        yield Workers(dist.get_rank(), size, dist.get_rank(), size)
        return
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": dp,
        "mp_degree": mp,
        "pp_degree": 1,
        "sharding_degree": sharding,
    }
    fleet.init(is_collective=True, strategy=strategy)
    groups = fleet.get_hybrid_communicate_group()
    data_rank = groups.get_data_parallel_rank() * sharding + groups.get_sharding_parallel_rank()
    yield Workers(dist.get_rank(), size, data_rank, dp * sharding, groups)


def degrees(settings: DistributedSettings, size: int) -> tuple[int, int, int]:
    """(dp, mp, sharding) that multiply to `size`; `dp_degree: auto` is what is left."""
    mp, sharding = settings.mp_degree, settings.sharding.sharding_degree
    inner = mp * sharding
    dp = max(1, size // inner) if settings.dp_degree == "auto" else settings.dp_degree
    if dp * inner != size:
        raise UserError(
            f"Distributed asks for {dp} (dp) * {mp} (mp) * {sharding} (sharding) = {dp * inner} "
            f"processes, and there are {size}",
            f"start {dp * inner} processes, or let the degrees multiply to {size}",
        )
    return dp, mp, sharding


def choose_device(wanted: str) -> str:
    """Paddle's name of the device of `Global.device`."""
    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if wanted == "gpu" and not count:
        raise UserError("Global.device is gpu and Paddle sees none", "-o Global.device=auto")
    return "cpu" if wanted == "cpu" or not count else "gpu"


def require_device(recipe: Recipe) -> None:
    """Raise UserError for what Paddle does on GPUs only, where it has none."""
    if not paddle.device.get_device().startswith("gpu"):
        require_no_gpu_needed(recipe)
        if recipe.Engine.mix_precision.dtype != "float32":
            log.warning("mix_precision: Paddle 2.6 has it on GPUs only: this computes in float32")


def seed_everything(*values: int) -> None:
    """Seed dropout as a pure function of `values`, so that a resumed run draws the same."""
    paddle.seed(int(np.random.SeedSequence(values).generate_state(1)[0] % 2**31))
