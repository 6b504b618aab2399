"""The number of processes and machines that a training run needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lathe_base.config.settings import Recipe
from lathe_base.config.settings.placement import Placement
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


def require_whole_gpus(
    gpus: int, settings: Placement, labels: Iterable[Mapping[str, str]] = ()
) -> None:
    """Refuse several slices for one pod: two may be parts of the same device, on which NCCL starts
    no second process, and MIG slices cannot exchange data.

    Args:
        gpus: number of GPUs of the pod.
        labels: those of the nodes that it may run on, as far as they are known.

    Raises:
        UserError: the resource's name, or a node's label, says that they are slices.
    """
    resource = settings.gpu_resource
    if gpus < 2:
        return
    labels = list(labels) if resource == "nvidia.com/gpu" else []
    # MIG's strategy `single` gives slices the name of whole GPUs.
    if "/mig-" in resource or any("-MIG-" in one.get(f"{resource}.product", "") for one in labels):
        kind = "are MIG slices"
    elif resource.endswith(".shared") or any(
        one.get(f"{resource}.replicas", "1") not in ("0", "1") for one in labels
    ):
        kind = "are time slices"
    else:
        return
    raise UserError(
        f"Launch.gpus_per_node={gpus}: {gpus} of {resource} {kind}, and two of them may be one "
        "device",
        "request one per pod (GPUS=1), or whole GPUs of a node that is not divided "
        "(Launch.gpu_resource, Launch.node_selector)",
        Code.LAYOUT,
    )


def visible_gpus() -> int:
    """Number of GPUs that torch finds on this machine."""
    import torch  # only where it is needed: it takes seconds

    return torch.cuda.device_count()
