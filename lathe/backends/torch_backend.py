"""The stages in torch. Each is imported when it is called, because torch takes seconds to
import."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lathe_base.config.settings import Recipe

if TYPE_CHECKING:
    from lathe.compress.sensitivity.result import SensitivityResult
    from lathe.evaluate.measure_model import EvalResult, TaskOption
    from lathe.export.export import ExportResult
    from lathe.train.result import TrainResult


class Backend:
    """The stages that may have another implementation; these are torch's.

    Attributes:
        TRAINJOB_RUNTIME: the TrainingRuntime of the cluster that its processes run in; None:
            Lathe's default.
    """

    TRAINJOB_RUNTIME: str | None = None

    def starts_processes(self, verb: str) -> bool:
        """Whether the verb starts the recipe's processes itself; Lathe starts torch's workers."""
        return False

    def prune(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "TrainResult":
        """See `lathe.compress.prune.prune`."""
        from lathe.compress.prune import prune

        return prune(recipe, model, data, output)

    def quantize(
        self, recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
    ) -> "TrainResult":
        """See `lathe.compress.quantize.quantize`."""
        from lathe.compress.quantize import quantize

        return quantize(recipe, model, data, output, sensitivity)

    def analyze(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "SensitivityResult":
        """See `lathe.compress.sensitivity.analyze.analyze`."""
        from lathe.compress.sensitivity.analyze import analyze

        return analyze(recipe, model, data, output)

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
        """See `lathe.evaluate.evaluate.evaluate`."""
        from lathe.evaluate.evaluate import evaluate

        return evaluate(recipe, model, output, data, cloze, text, endpoint, tasks, reference)

    def export(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "ExportResult":
        """See `lathe.export.export.export`."""
        from lathe.export.export import export

        return export(recipe, model, data, output)

    def check_environment(self) -> None:
        """Raise UserError if this machine lacks the backend's environment; torch is in Lathe's
        own."""

    def check_support(self, verb: str, recipe: Recipe, has_gpu: bool) -> None:
        """Raise UserError if the recipe asks `verb` for something that the backend cannot do; the
        torch stages support every recipe.

        Args:
            has_gpu: whether the verb will run on GPUs.
        """


TORCH = Backend()
