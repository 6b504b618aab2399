"""Selects the backend, torch or PaddlePaddle, by the recipe's `Compress.engine`.

    backends.of(recipe).prune(recipe, model, data, output)

No other code decides between them. Paddle needs its own environment, so its stages run in another
process; see `lathe.backends.paddle_process`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lathe_base.config.settings import Recipe

if TYPE_CHECKING:
    from lathe.compress.sensitivity.result import SensitivityResult
    from lathe.evaluate.measure_model import EvalResult, TaskOption
    from lathe.export.export import ExportResult
    from lathe.train.result import TrainResult


class Backend(Protocol):
    """The stages that have two implementations; parameters and errors are those of the torch
    stages."""

    TRAINJOB_RUNTIME: str | None
    """The TrainingRuntime of the cluster that its processes run in; None: Lathe's default."""

    def starts_processes(self, verb: str) -> bool:
        """Whether the verb starts the recipe's processes itself."""

    def prune(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "TrainResult":
        """See `lathe.compress.prune`."""

    def quantize(
        self, recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
    ) -> "TrainResult":
        """See `lathe.compress.quantize`."""

    def analyze(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "SensitivityResult":
        """See `lathe.compress.sensitivity.analyze`."""

    def evaluate(
        self,
        recipe: Recipe,
        model: Path | str,
        output: Path,
        data: Path | None = None,
        cloze: Path | None = None,
        text: Path | None = None,
        endpoint: str | None = None,
        tasks: "Sequence[TaskOption]" = (),
        reference: Path | str | None = None,
    ) -> "EvalResult":
        """See `lathe.evaluate.evaluate`."""

    def export(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "ExportResult":
        """See `lathe.export.export`."""

    def check_environment(self) -> None:
        """Raise UserError if this machine lacks the backend's environment."""

    def check_support(self, verb: str, recipe: Recipe, has_gpu: bool) -> None:
        """Raise UserError if the recipe asks `verb` for something that the backend cannot do.

        Args:
            has_gpu: whether the verb will run on GPUs.
        """


def of(recipe: Recipe) -> Backend:
    """The backend that the recipe chooses; its libraries are imported by the stage that runs."""
    if recipe.Compress.engine == "paddle":
        from lathe.backends import paddle_backend

        return paddle_backend
    from lathe.backends import torch_backend

    return torch_backend


def start_workers(command: Sequence[str], recipe: Recipe) -> bool:
    """Like `lathe_launch.local.start_workers`, but False for a backend that starts its own
    processes, because the stage is then called in this process."""
    if of(recipe).starts_processes(command[0]):
        return False
    from lathe_launch.local import start_workers

    return start_workers(command, recipe)
