"""This process's ranks among the processes that `paddle.distributed.launch` started, if any, and
the division of a model over them by tensor parallelism, which Paddle 2.6 supports on GPUs only."""

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle.distributed import fleet

from lathe.backends.paddle_support import require_no_gpu_needed
from lathe.model.architecture import Architecture
from lathe.train.group import missing_gpu
from lathe.train.heartbeats import Heartbeats, meet
from lathe_base.config.settings import DistributedSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import Arrays, float_weights, is_weight
from lathe_paddle.gpt import GPT

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Workers:
    """Ranks and groups of this process.

    Attributes:
        rank, size: among all processes.
        data_rank, data_size: among the parts into which a global batch is divided, along `dp` and
            `sharding`.
        replicas, shards, parts: Paddle's groups along dp, sharding and mp; None stands for all
            processes in the first, and for this process alone in the others.
        store, heartbeats: None in a group of one.
        timeout: seconds that a process may have no heartbeat while others wait for it.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    replicas: Any = None
    shards: Any = None
    parts: Any = None
    store: "PaddleStore | None" = None
    heartbeats: Heartbeats | None = None
    timeout: float = 1800.0
    _turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def mp(self) -> int:
        """Processes over which every block linear is divided."""
        return len(self.parts.ranks) if self.parts else 1

    @property
    def mp_rank(self) -> int:
        """Rank within tensor parallelism."""
        return self.parts.ranks.index(self.rank) if self.parts else 0

    @property
    def sharding(self) -> int:
        """Processes over which gradients and moments are divided."""
        return len(self.shards.ranks) if self.shards else 1

    @property
    def sharding_rank(self) -> int:
        """Rank within sharding."""
        return self.shards.ranks.index(self.rank) if self.shards else 0

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    @property
    def is_replica(self) -> bool:
        """Whether another process, earlier along `dp`, holds the same state."""
        return self.data_rank != self.sharding_rank

    def barrier(self) -> None:
        """Wait for all processes, however long one of them works alone."""
        if self.size > 1:
            self._meet()
            dist.barrier()

    def _meet(self) -> None:
        """Wait for all processes outside of collectives: Paddle 2.6's between CPUs end after 30
        seconds, and those between GPUs after `Distributed.timeout_minutes`.

        Raises:
            StageError: one of them has had no heartbeat for `timeout`.
        """
        key = f"meet {next(self._turns)}"
        if self.store is not None and self.heartbeats is not None:
            meet(key, self.rank, self.size, self.store, self.heartbeats, self.timeout)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes."""
        if self.size == 1:
            return values
        tensor = paddle.to_tensor(values, dtype="float64")
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.numpy()]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, which are waited for as in `barrier`. Lathe's own
        processes exchange them as pickles."""
        if self.size == 1:
            return [value]
        self._meet()
        gathered: list[Any] = []
        dist.all_gather_object(gathered, value)
        return gathered


@contextmanager
def join_workers(recipe: Recipe) -> Iterator[Workers]:
    """Join the group that the launcher's environment describes; a group of one without it.

    Raises:
        UserError: the recipe's degrees do not multiply to the number of processes, or ask for what
            Paddle does not support on this device.
    """
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
    dp, mp, sharding = degrees(recipe.Distributed, size)
    timeout = 60 * recipe.Distributed.timeout_minutes
    os.environ["PADDLE_PG_TIMEOUT"] = str(int(1000 * timeout))  # of collectives between GPUs
    paddle.set_device(choose_device(recipe))
    require_device(recipe)
    # One process needs no group; tensor parallelism needs fleet; otherwise plain groups are enough.
    if size == 1:
        yield Workers()
        return
    workers = _join_fleet(dp, mp, sharding) if mp > 1 else _join(dp, sharding, size)
    with Heartbeats(PaddleStore(), workers.rank, size) as heartbeats:
        # A client of its own: requests of one client wait for each other.
        yield replace(workers, store=PaddleStore(), heartbeats=heartbeats, timeout=timeout)


class PaddleStore:
    """A client of the store that Paddle's processes met at, which runs in the first one; see
    `lathe.train.heartbeats.Store`."""

    def __init__(self) -> None:
        # As `paddle.distributed.init_parallel_env` finds it.
        variables = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
        address = ":".join(filter(None, variables)) if all(variables) else ""
        address = address or os.environ.get("PADDLE_MASTER", "")
        address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
        host, _, port = address.rpartition(":")
        # The size 0 does not wait for other clients.
        self._client = paddle.base.core.TCPStore(host, int(port), False, 0)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        return int(self._ask(self._client.add, key, value))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(self._client.set, key, value)
        self.add(f"{key} is set", 1)  # Paddle's store cannot tell whether a key exists

    def get(self, key: str) -> bytes:
        """The value of a key, which exists."""
        return bytes(self._ask(self._client.get, key))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""
        return all(self.add(f"{key} is set", 0) for key in keys)

    def _ask(self, request: Any, *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except Exception as error:  # of several types, by the reason of Paddle's C++ code
            raise RuntimeError(f"the first process's store does not answer: {error}") from error


def _join(dp: int, sharding: int, size: int) -> Workers:
    """Join by plain groups."""
    dist.init_parallel_env()
    rank, replicas, shards = dist.get_rank(), None, None
    if sharding > 1:
        ranks = np.arange(size).reshape(dp, sharding)
        replicas, shards = _find_rank_group(rank, ranks.T), _find_rank_group(rank, ranks)
    return Workers(rank, size, rank, size, replicas, shards)


def _find_rank_group(rank: int, groups: NDArray[np.int64]) -> Any:
    """Make all groups; returns this process's. They are made one after another: otherwise processes
    that are still making one group may refuse those of the next."""
    rank_group = None
    for ranks in groups.tolist():
        group = dist.new_group(ranks)
        dist.barrier()
        rank_group = group if rank in ranks else rank_group
    return rank_group


def _join_fleet(dp: int, mp: int, sharding: int) -> Workers:
    """Join by fleet, because its parallel linears look up its groups."""
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
    return Workers(
        dist.get_rank(),
        dist.get_world_size(),
        groups.get_data_parallel_rank() * sharding + groups.get_sharding_parallel_rank(),
        dp * sharding,
        groups.get_data_parallel_group(),
        groups.get_sharding_parallel_group(),
        groups.get_model_parallel_group(),
    )


def degrees(settings: DistributedSettings, size: int) -> tuple[int, int, int]:
    """(dp, mp, sharding) that multiply to `size`; `dp_degree: auto` takes what is left.

    Raises:
        UserError: they do not multiply to `size`.
    """
    mp, sharding = settings.mp_degree, settings.sharding.sharding_degree
    inner = mp * sharding
    dp = max(1, size // inner) if settings.dp_degree == "auto" else settings.dp_degree
    if dp * inner != size:
        raise UserError(
            f"Distributed asks for {dp} (dp) * {mp} (mp) * {sharding} (sharding) = {dp * inner} "
            f"processes, but there are {size}",
            f"start {dp * inner} processes, or choose degrees that multiply to {size}",
            Code.LAYOUT,
        )
    return dp, mp, sharding


def choose_device(recipe: Recipe) -> str:
    """Paddle's name of the device of `Global.device`.

    Raises:
        UserError: see `lathe.train.workers.choose_device`.
    """
    wanted, has_cuda = recipe.Global.device, bool(paddle.is_compiled_with_cuda())
    if wanted == "cpu":
        return "cpu"
    if has_cuda and paddle.device.cuda.device_count():
        return "gpu"
    if wanted == "gpu" or recipe.Launch.gpus_per_node:
        raise missing_gpu(recipe, f"Paddle {paddle.__version__}", has_cuda)
    return "cpu"


def require_device(recipe: Recipe) -> None:
    """Raise UserError if the recipe needs what Paddle supports on GPUs only and there is none."""
    if not paddle.device.get_device().startswith("gpu"):
        require_no_gpu_needed(recipe)
        if recipe.Engine.mix_precision.dtype != "float32":
            log.warning("mix_precision: Paddle 2.6 supports it on GPUs only; computing in float32")


def seed_everything(*values: int) -> None:
    """Seed dropout as a pure function of `values`, so that a resumed run draws the same."""
    paddle.seed(int(np.random.SeedSequence(values).generate_state(1)[0] % 2**31))


# --- tensor parallelism ---


def divide(model: GPT, workers: Workers) -> None:
    """Replace every block linear, in place, with this process's part: heads and FFN channels.

    Embedding, head and norms are whole in every process. Does nothing if mp is 1.

    Raises:
        UserError: mp does not divide a layer's heads or channels.
    """
    if workers.mp == 1:
        return
    parts, part = workers.mp, workers.mp_rank
    config = model.config
    for i, (heads, inner) in enumerate(zip(config.n_head, config.n_inner, strict=True)):
        if heads % parts or inner % parts:
            raise UserError(
                f"layer {i} has {heads} heads and {inner} FFN channels, which "
                f"Distributed.mp_degree {parts} does not divide",
                "choose another degree, or prune to a multiple of it",
                Code.LAYOUT,
            )
    for path in config.linear_names():
        linear = fake_quant.layer_at(model, path)
        n_in, n_out = linear.weight.shape
        is_column = split_axis(f"{path}.weight", config.architecture) == 1
        # The first linear of a pair keeps its part of the output, and the second takes it as it is:
        # one exchange for both, the sum after the second.
        if is_column:
            layer = fleet.meta_parallel.ColumnParallelLinear(
                n_in, n_out, has_bias=True, gather_output=False
            )
        else:
            layer = fleet.meta_parallel.RowParallelLinear(
                n_in, n_out, has_bias=True, input_is_parallel=True
            )
        axis = 1 if is_column else 0
        layer.weight.set_value(np.split(linear.weight.numpy(), parts, axis)[part])
        bias = linear.bias.numpy()  # of a row linear whole: it is added after the sum
        layer.bias.set_value(np.split(bias, parts)[part] if is_column else bias)
        parent, _, attribute = path.rpartition(".")
        setattr(fake_quant.layer_at(model, parent), attribute, layer)


def whole_weights(model: GPT, workers: Workers) -> Arrays:
    """The whole weights, gathered from all parts, in every process."""
    if workers.mp == 1:
        return float_weights(model)
    whole: Arrays = {}
    for name, parameter in model.named_parameters():
        if not is_weight(name):
            continue
        arrays, axis = [parameter], split_axis(name, model.config.architecture)
        if axis is not None:
            arrays = []
            paddle.distributed.all_gather(arrays, parameter.detach(), group=workers.parts)
        whole[name] = np.concatenate([x.numpy() for x in arrays], axis or 0).astype(np.float32)
    return whole


def split_axis(name: str, architecture: Architecture) -> int | None:
    """The axis along which a parameter is divided; None if every process has it whole."""
    linear, is_weight = architecture.find_linear(name), name.endswith(".weight")
    if linear is not None and linear.style == "column":
        return 1 if is_weight else 0
    return 0 if linear is not None and is_weight else None
