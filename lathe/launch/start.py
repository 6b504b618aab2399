"""Where a training command's processes run on this machine: in this one, or in several."""

import os
from collections.abc import Sequence

from lathe.config.settings import Recipe
from lathe.launch.local import launch
from lathe.launch.node import run_node, this_node
from lathe.launch.parent import end_with_parent
from lathe.launch.shape import shape_of


def start_workers(command: Sequence[str], recipe: Recipe) -> bool:
    """Run `lathe <command>` in the processes that the recipe asks for, and wait for them.

    On one node of several (torchrun's PET_* environment, which Kubeflow's Trainer sets) it is
    this node's processes, else all of them, on this machine.

    Returns:
        False where one process is enough, or this process is itself a worker: do the work here.

    Raises:
        UserError: see `shape_of` and `require_processes`.
        WorkerFailed, Preempted: see `lathe.launch.local.launch`.
    """
    if "RANK" in os.environ:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        return False
    if node := this_node():
        arguments = ["-m", "lathe", *command]
        run_node(arguments, node, recipe.Distributed.grace_seconds)
        return True
    shape = shape_of(recipe)
    if shape.processes == 1:
        return False
    from lathe.train.capacity import require_processes

    require_processes(shape.processes)
    launch(command, shape, recipe.Distributed.grace_seconds)
    return True
