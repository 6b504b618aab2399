"""Start a training command's worker processes on this machine, if it needs more than one."""

import os
from collections.abc import Sequence

from lathe_base.config.settings import Recipe
from lathe_launch.local import launch
from lathe_launch.memory import require_processes
from lathe_launch.node import run_node, this_node
from lathe_launch.parent import die_with_parent
from lathe_launch.shape import POD_GRACE_SECONDS, required_shape

EXIT_SECONDS = 10
"""Seconds of the pod's termination grace period reserved for the node process after its workers
exit."""


def start_workers(command: Sequence[str], recipe: Recipe) -> bool:
    """Run `lathe <command>` in the processes that the recipe requires, and wait for them.

    In a multi-node job (torchrun's PET_* environment, which Kubeflow's Trainer sets) these are this
    node's processes, otherwise all of them, on this machine.

    Returns:
        False if one process is enough, or if this process is itself a worker: the caller then does
        the work in this process.

    Raises:
        UserError: see `required_shape` and `require_processes`.
        WorkerFailed, Preempted: see `lathe_launch.local.launch`.
    """
    if "RANK" in os.environ:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        return False
    if node := this_node():
        arguments = ["-m", "lathe", *command]
        run_node(arguments, node, POD_GRACE_SECONDS - EXIT_SECONDS)
        return True
    shape = required_shape(recipe)
    if shape.processes == 1:
        return False
    require_processes(shape.processes)
    launch(command, shape, recipe.Distributed.grace_seconds)
    return True
