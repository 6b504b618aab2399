"""The number of processes and machines that a training run needs."""

from dataclasses import dataclass

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError, code_in

POD_GRACE_SECONDS = 300
"""Seconds that a pod of a TrainJob has after SIGTERM to save its state and upload it."""
SCHEDULING_SECONDS = 3600.0
"""Seconds that the pods of a TrainJob may wait for nodes, and nodes for each other."""


@dataclass(frozen=True)
class Shape:
    """The processes of a training: `nodes` machines with `processes_per_node` each."""

    nodes: int = 1
    processes_per_node: int = 1

    @property
    def processes(self) -> int:
        """Total number of processes."""
        return self.nodes * self.processes_per_node


class WorkerFailed(StageError):
    """A worker failed: its rank, exit code (negative: a signal) and last lines."""

    def __init__(self, rank: int, exit_code: int, tail: str) -> None:
        super().__init__(
            f"rank {rank} ended with exit code {exit_code}; its last lines:\n{tail}",
            Code.KILLED if exit_code < 0 else code_in(tail),
        )
        self.rank, self.exit_code, self.tail = rank, exit_code, tail
        if exit_code == UserError.status:
            self.status = exit_code


def required_shape(recipe: Recipe) -> Shape:
    """The processes that the recipe's parallel degrees require, divided among `Launch.nodes`.

    `dp_degree: auto` starts one process per GPU (of this machine, or `Launch.gpus_per_node` of
    every node), or as few as the other degrees allow where there are no GPUs.

    Raises:
        UserError: the number of processes is not divisible by the number of nodes.
    """
    settings, nodes = recipe.Distributed, recipe.Launch.nodes
    # The other degrees' processes, which data parallelism multiplies.
    inner = settings.mp_degree * settings.pp_degree * settings.sharding.sharding_degree
    gpus = nodes * (recipe.Launch.gpus_per_node or visible_gpus())
    if settings.dp_degree == "auto":
        # Rounded down to whole replicas, but at least one process on every node.
        processes = max(gpus // inner, -(-nodes // inner)) * inner
    else:
        processes = settings.dp_degree * inner
    if processes % nodes:
        raise UserError(
            f"Distributed asks for {processes} processes, but Launch.nodes is {nodes}: every node "
            "must have the same number",
            "make the product of the degrees a multiple of Launch.nodes",
            Code.LAYOUT,
        )
    return Shape(nodes, processes // nodes)


def visible_gpus() -> int:
    """Number of GPUs that torch finds on this machine."""
    import torch  # only where it is needed: it takes seconds

    return torch.cuda.device_count()
