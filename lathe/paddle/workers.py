"""This process's place among those that `paddle.distributed.launch` started, if it did."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.distributed as dist

from lathe.errors import UserError
from lathe.settings import DistributedSettings, Recipe


@dataclass(frozen=True)
class Workers:
    """Attributes:
    rank, size: of all processes.
    data_rank, data_size: of the parts into which a global batch is divided, along `dp` and
        `sharding`.
    mp, sharding: processes that every linear, and the optimizer's state, are divided over.
    """

    rank: int
    size: int
    data_rank: int
    data_size: int
    mp: int = 1
    sharding: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether a process has but a part of the model's state."""
        return self.mp > 1 or self.sharding > 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

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
    require_device(mp, sharding)
    if size == 1:
        yield Workers(0, 1, 0, 1)
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
    yield Workers(dist.get_rank(), size, data_rank, dp * sharding, mp, sharding)


def degrees(settings: DistributedSettings, size: int) -> tuple[int, int, int]:
    """(dp, mp, sharding) that multiply to `size`; `dp_degree: auto` is what is left."""
    mp, sharding = settings.mp_degree, settings.sharding.sharding_degree
    if settings.pp_degree > 1:
        raise UserError(
            f"Distributed.pp_degree is {settings.pp_degree}, and the Paddle engine has no pipeline",
            "use mp_degree or sharding, or Compress.engine=torch",
        )
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


def require_device(mp: int, sharding: int) -> None:
    """Raise UserError for what Paddle has no CPU kernels for."""
    if (mp > 1 or sharding > 1) and not paddle.device.get_device().startswith("gpu"):
        what = f"mp_degree {mp}" if mp > 1 else f"sharding_degree {sharding}"
        raise UserError(
            f"Distributed.{what}: Paddle 2.6 divides a model on GPUs only, and this is a CPU",
            "run it on GPUs, set the degree to 1, or use Compress.engine=torch",
        )


def seed_everything(*values: int) -> None:
    """Seed dropout as a pure function of `values`, so that a resumed run draws the same."""
    paddle.seed(int(np.random.SeedSequence(values).generate_state(1)[0] % 2**31))
