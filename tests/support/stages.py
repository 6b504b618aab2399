"""Stages run through the recipe's backend, as by the command line and the components."""

from pathlib import Path

from lathe import backends
from lathe.compress.sensitivity.result import SensitivityResult
from lathe.evaluate.measure_model import EvalResult
from lathe.export.export import ExportResult
from lathe.train.result import TrainResult
from lathe_base.config.settings import Recipe


def prune(recipe: Recipe, model: Path, data: Path, output: Path) -> TrainResult:
    return backends.of(recipe).prune(recipe, model, data, output)


def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> TrainResult:
    return backends.of(recipe).quantize(recipe, model, data, output, sensitivity)


def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> SensitivityResult:
    return backends.of(recipe).analyze(recipe, model, data, output)


def evaluate(recipe: Recipe, model: Path, output: Path, text: Path | None = None) -> EvalResult:
    return backends.of(recipe).evaluate(recipe, model, output, text=text)


def export(recipe: Recipe, model: Path, data: Path, output: Path) -> ExportResult:
    return backends.of(recipe).export(recipe, model, data, output)
