"""The stages in torch. Each is imported when it is called, because torch takes seconds to
import."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lathe_base.config.settings import Recipe

if TYPE_CHECKING:
    from lathe.compress.sensitivity.result import SensitivityResult
    from lathe.evaluate.measure_model import EvalResult, GivenTask
    from lathe.export.export import ExportResult
    from lathe.train.result import TrainResult

TRAINJOB_RUNTIME: str | None = None


def starts_processes(verb: str) -> bool:
    """Lathe starts torch's workers."""
    return False


def prune(recipe: Recipe, model: Path, data: Path, output: Path) -> "TrainResult":
    """See `lathe.compress.prune.prune`."""
    from lathe.compress.prune import prune

    return prune(recipe, model, data, output)


def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> "TrainResult":
    """See `lathe.compress.quantize.quantize`."""
    from lathe.compress.quantize import quantize

    return quantize(recipe, model, data, output, sensitivity)


def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> "SensitivityResult":
    """See `lathe.compress.sensitivity.analyze.analyze`."""
    from lathe.compress.sensitivity.analyze import analyze

    return analyze(recipe, model, data, output)


def evaluate(
    recipe: Recipe,
    model: Path | str,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    endpoint: str | None = None,
    tasks: "Sequence[GivenTask]" = (),
    reference: Path | str | None = None,
) -> "EvalResult":
    """See `lathe.evaluate.evaluate.evaluate`."""
    from lathe.evaluate.evaluate import evaluate

    return evaluate(recipe, model, output, data, cloze, text, endpoint, tasks, reference)


def export(recipe: Recipe, model: Path, data: Path, output: Path) -> "ExportResult":
    """See `lathe.export.export.export`."""
    from lathe.export.export import export

    return export(recipe, model, data, output)


def check_environment() -> None:
    """Nothing to check: torch is in Lathe's own environment."""


def check_support(verb: str, recipe: Recipe, has_gpu: bool) -> None:
    """Nothing to check: the torch stages support every recipe."""
