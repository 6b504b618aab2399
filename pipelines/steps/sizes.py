"""Resource needs of a run's steps, estimated from the model and the recipe."""

import math
from dataclasses import dataclass

from lathe.model.config import GPTConfig
from lathe.train.layout import wanted_layout
from lathe.train.memory import estimate
from lathe_base.config.settings import Recipe
from lathe_launch.shape import shape_of

GIB = 2**30
PROCESS_GIB, CUDA_GIB = 1.0, 3.0
"""Memory of a process that has imported torch, and the host memory that CUDA adds."""
COPIES_WHILE_SAVING = 8
"""Copies of the float32 weights while saving, in addition to training's: the state is copied, then
written."""
CORES = {5e7: "500m", 5e8: "1"}
"""Number of parameters -> CPU request of a step for models up to that size; there is no limit."""
MOST_CORES = "4"
LIMIT = 2
"""Memory limit relative to the memory request."""


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
        shape = shape_of(recipe)
        held = estimate(config, recipe, wanted_layout(recipe, shape.processes)).total / GIB
        training = shape.processes_per_node * (PROCESS_GIB + held + saving)
    cpus = next((cores for most, cores in CORES.items() if parameters <= most), MOST_CORES)
    return Sizes(cpus, weights, training)


def quantity(gib: float) -> str:
    """Memory as a Kubernetes quantity, rounded up to a quarter of a GiB."""
    return f"{math.ceil(4 * gib) * 256}Mi"
