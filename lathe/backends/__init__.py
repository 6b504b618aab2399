"""Selects the backend, torch or PaddlePaddle, by the recipe's `Compress.engine`.

    backends.of(recipe).prune(recipe, model, data, output)

No other code decides between them. Paddle needs its own environment, so its stages run in another
process; see `lathe.backends.paddle_process`.
"""

from collections.abc import Sequence

from lathe.backends.torch_backend import TORCH, Backend
from lathe_base.config.settings import Recipe


def of(recipe: Recipe) -> Backend:
    """The backend that the recipe chooses."""
    if recipe.Compress.engine == "paddle":
        from lathe.backends.paddle_backend import PADDLE

        return PADDLE
    return TORCH


def start_workers(command: Sequence[str], recipe: Recipe) -> bool:
    """Like `lathe_launch.local.start_workers`, but False for a backend that starts its own
    processes, because the stage is then called in this process."""
    if of(recipe).starts_processes(command[0]):
        return False
    from lathe_launch.local import start_workers

    return start_workers(command, recipe)
