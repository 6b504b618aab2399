"""Resource needs of a run's steps, estimated from the model and the recipe."""

import math
from dataclasses import dataclass

from lathe.config.settings import Recipe
from lathe.launch.shape import shape_of
from lathe.model.config import GPTConfig
from lathe.train.layout import wanted_layout
from lathe.train.memory import estimate

GIB = 2**30
PROCESS_GIB, CUDA_GIB = 1.0, 3.0
"""Memory of a process with torch, and the host memory that CUDA adds."""
COPIES_WHILE_SAVING = 8
"""Copies of the float32 weights in addition to training's own: the state is copied, then written.
"""
CORES = {5e7: "500m", 5e8: "1"}
"""Parameters up to which a step on CPUs asks for so little; it takes more where it is free."""
MOST_CORES = "4"
LIMIT = 2
"""The memory at which a step is killed, relative to what it asks for."""


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    cpus: cores of a step that runs on CPUs, as Kubernetes writes them.
    weights: GiB of the model in float32.
    training: GiB of host memory of a machine that trains it.
    """

    cpus: str
    weights: float
    training: float

    def holding(self, copies: int, has_gpu: bool = False) -> float:
        """GiB of a step that holds so many copies of the weights at once."""
        return PROCESS_GIB + CUDA_GIB * has_gpu + copies * self.weights


def estimate_sizes(config: GPTConfig, recipe: Recipe) -> Sizes:
    """The needs of a run that trains this model on the machines of the recipe's group Launch.

    On CPUs, training memory is the planner's estimate; on GPUs the host holds the weights while
    they are loaded, and the state while it is saved.
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
    """Memory as Kubernetes writes it, rounded up to a quarter of a GiB."""
    return f"{math.ceil(4 * gib) * 256}Mi"
