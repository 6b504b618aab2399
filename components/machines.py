"""The machines that a run's steps request, estimated from its recipe and model.

A step's pod names values of `requests`, which the first step of a run returns: one compiled
pipeline runs with and without GPUs, and on one node or several.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lathe.model.config import GPTConfig
from lathe.train.layout import wanted_layout
from lathe.train.memory import estimate
from lathe_base.config.settings import LaunchSettings, Placements, Recipe
from lathe_base.config.settings.placement import NODE_POOL
from lathe_base.config.settings.types import parse_bytes
from lathe_launch.shape import required_shape

GIB = 2**30
PROCESS_GIB, CUDA_GIB = 1.0, 3.0
"""Memory of a process that has imported torch, and the host memory that CUDA adds."""
COPIES_WHILE_SAVING = 8
"""Copies of the float32 weights while saving, in addition to training's: the state is copied, then
written."""
COPIES = {"gpu": 6, "cpu": 10, "text": 2}
"""Kind of machine -> copies of the float32 weights that its steps hold at once, at most."""
CORES = {5e7: "500m", 5e8: "1"}
"""Number of parameters -> CPU request of a step for models up to that size; there is no limit."""
MAX_CPU_REQUEST = "4"
LIMIT = 2
"""Memory limit relative to the memory request."""
MEMORY_GIB, CPU_MEMORY_GIB = 32, 8
"""Memory per GPU, and without GPUs, if the model is unknown."""
SHARED_MEMORY_GIB, CPU_SHARED_MEMORY_GIB = 8, 2
"""Files in /dev/shm per GPU, and without GPUs, which count towards the memory limit."""
LAUNCHER = ("100m", "512Mi", "4Gi")
"""CPUs, memory and memory limit of a step that only starts a TrainJob and follows it."""


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    cpus: CPU request of a step that runs on CPUs, a Kubernetes quantity.
    weights: GiB of the model's float32 weights.
    training: GiB of host memory per training node.
    """

    cpus: str
    weights: float
    training: float

    def holding(self, copies: int, has_gpu: bool = False) -> float:
        """GiB of a step that holds `copies` copies of the weights at once."""
        return PROCESS_GIB + CUDA_GIB * has_gpu + copies * self.weights


@dataclass(frozen=True)
class Pool:
    """The machines of a run, as its parameters say.

    Attributes:
        gpus: GPUs of each node that trains; with 0, no step requests any.
        nodes: nodes per training; with several, the steps that train start a TrainJob.
        cpus: CPU cores of every step that computes; 0 for an estimate.
        memory: memory of every step that computes, as request and limit; an estimate when empty.
        node_pool: value of the node label lathe/node-pool for steps with GPUs.
        queue: Kueue LocalQueue of the training, which is then a TrainJob; none when empty.
    """

    gpus: int = 1
    nodes: int = 1
    cpus: int = 0
    memory: str = ""
    node_pool: str = "gpu"
    queue: str = ""

    @staticmethod
    def from_arguments(arguments: Mapping[str, Any]) -> "Pool":
        """The machines among the arguments of a run."""
        names = Pool.__dataclass_fields__.keys() & arguments.keys()
        return Pool(**{name: arguments[name] for name in names})

    @property
    def overrides(self) -> list[str]:
        """As overrides of a recipe."""
        values: dict[str, object] = {"nodes": self.nodes, "gpus_per_node": self.gpus}
        optional = {"cpus_per_node": self.cpus, "memory_per_node": self.memory, "queue": self.queue}
        optional |= {"node_pool": self.node_pool if self.gpus else ""}
        values |= {key: value for key, value in optional.items() if value}
        return [f"Launch.{key}={value}" for key, value in values.items()]


def starts_trainjob(launch: LaunchSettings) -> bool:
    """Whether a training step on a cluster starts a TrainJob: on several nodes, or in a queue,
    which admits TrainJobs only, because Pipelines cannot label pods by a run's parameters."""
    return launch.nodes > 1 or launch.queue is not None


def gpu_cores(gpus: int) -> int:
    """CPU cores of a pod with so many GPUs: for each a process, its data loader, NCCL's threads and
    the copies of a save. One GPU gets fewer, as it may be all that a small node has."""
    return 8 * gpus if gpus > 1 else 4 * gpus


def trainjob_overrides(launch: LaunchSettings, sizes: Sizes | None) -> list[str]:
    """What a TrainJob's pods request, unless the recipe says it, as overrides."""
    gpus = launch.gpus_per_node
    if not starts_trainjob(launch) or not (sizes or gpus):
        return []
    if sizes:
        shared = parse_bytes(launch.shared_memory) / GIB if launch.shared_memory else 0.0
        memory = LIMIT * sizes.training + shared
    else:
        memory = (MEMORY_GIB + SHARED_MEMORY_GIB) * gpus
    estimated = {"cpus_per_node": gpu_cores(gpus) or 1, "memory_per_node": quantity(memory)}
    missing = estimated.keys() - launch.model_fields_set
    return [f"Launch.{key}={estimated[key]}" for key in sorted(missing)]


def placement_overrides(launch: LaunchSettings) -> list[str]:
    """The placement of a run's first recipe as overrides of its others, for their TrainJobs."""
    # Only what the recipe sets: the defaults of its group would hide those of the others.
    keys = {*Placements.model_fields, "extra_resources"}
    settings = launch.model_dump(include=keys, exclude_unset=True)
    return [f"Launch.{key}={json.dumps(value)}" for key, value in settings.items()]  # valid YAML


def requests(launch: LaunchSettings, sizes: Sizes | None) -> dict[str, Any]:
    """What the pods of each kind of step request: `training_gpus`, `cpu_memory` and so on.

    The kinds are those of `components.step.Machine`. Quantities are strings, because Pipelines 2.17
    reads parameters of other types as empty in a pod's resources.

    Args:
        sizes: None if the model's size is not known.
    """
    # Where: steps with GPUs are bound to the pool, unless the recipe chooses nodes itself.
    gpus = launch.gpus_per_node
    nothing: tuple[dict[str, str], list[dict[str, Any]]] = ({}, [])
    in_pool = {NODE_POOL: launch.node_pool} if launch.node_pool and gpus else {}
    of_pool = launch.model_copy(update={"tolerations": []})  # the others are compiled in
    on_gpus = (in_pool, of_pool.tolerated(launch.node_pool, True)) if gpus else nothing
    # How much: a step that starts a TrainJob computes nothing itself.
    starts = starts_trainjob(launch)
    node = _amounts(launch, gpus, sizes.training if sizes else None, sizes)
    kinds = {"training": LAUNCHER if starts else node, "node": node}
    for kind, copies in COPIES.items():
        step_gpus = min(1, gpus) if kind == "gpu" else 0
        gib = sizes.holding(copies, bool(step_gpus)) if sizes else None
        kinds[kind] = _amounts(launch, step_gpus, gib, sizes)
    values: dict[str, Any] = {}
    for kind, (cpus, memory, limit) in kinds.items():
        values |= {f"{kind}_cpus": cpus, f"{kind}_memory": memory, f"{kind}_memory_limit": limit}
    values |= {"training_gpus": "0" if starts else str(gpus), "node_gpus": str(gpus)}
    values |= {"gpu_gpus": str(min(1, gpus))}
    for kind, (selector, tolerations) in {
        "training": nothing if starts else on_gpus,
        "node": on_gpus,
        "gpu": on_gpus,
    }.items():
        values |= {f"{kind}_node_selector": selector, f"{kind}_tolerations": tolerations}
    return values


def _amounts(
    launch: LaunchSettings, gpus: int, gib: float | None, sizes: Sizes | None
) -> tuple[str, str, str]:
    """CPUs, memory and memory limit of a pod with so many GPUs and an estimate of its memory."""
    explicit = launch.model_fields_set
    cores = str(gpu_cores(gpus)) if gpus else sizes.cpus if sizes else MAX_CPU_REQUEST
    cpus = str(launch.cpus_per_node) if "cpus_per_node" in explicit else cores
    # What the user says is both request and limit; an estimate leaves room above itself.
    if "memory_per_node" in explicit:
        return cpus, launch.memory_per_node, launch.memory_per_node
    shared = SHARED_MEMORY_GIB * gpus or CPU_SHARED_MEMORY_GIB
    if gib is None:
        gib = MEMORY_GIB * gpus or CPU_MEMORY_GIB
    return cpus, quantity(gib), quantity(LIMIT * gib + shared)


def estimate_sizes(config: GPTConfig, recipe: Recipe) -> Sizes:
    """Estimate the needs of a run that trains this model on the nodes of the recipe's group Launch.

    On CPUs, training memory is the planner's estimate. With GPUs, the host holds the weights while
    they are loaded and the state while it is saved.
    """
    parameters, launch = config.n_params, recipe.Launch
    weights = 4 * parameters / GIB
    saving = COPIES_WHILE_SAVING * weights
    if gpus := launch.gpus_per_node:
        training = gpus * (PROCESS_GIB + CUDA_GIB + weights) + saving
    else:
        shape = required_shape(recipe)
        gpu_gib = estimate(config, recipe, wanted_layout(recipe, shape.processes)).total / GIB
        training = shape.processes_per_node * (PROCESS_GIB + gpu_gib + saving)
    cpus = next((cores for limit, cores in CORES.items() if parameters <= limit), MAX_CPU_REQUEST)
    return Sizes(cpus, weights, training)


def quantity(gib: float) -> str:
    """Memory as a Kubernetes quantity, rounded up to a quarter of a GiB."""
    return f"{math.ceil(4 * gib) * 256}Mi"
