"""The stages in PaddlePaddle; each runs as a process in Paddle's own environment."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe.backends.paddle_process import find_python, start
from lathe.backends.paddle_support import require_no_gpu_needed, require_supported
from lathe.backends.torch_backend import Backend
from lathe.compress.feasible import require_enabled
from lathe_base.artifacts.kinds import EVALUATION, EXPORT, PADDLE_EXPORT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder

if TYPE_CHECKING:
    from lathe.compress.sensitivity.result import SensitivityResult
    from lathe.evaluate.measure_model import EvalResult, TaskOption
    from lathe.export.export import ExportResult
    from lathe.train.result import TrainResult

TRAINJOB_RUNTIME = "lathe-paddle"


class PaddleBackend(Backend):
    """The stages of PaddlePaddle and PaddleSlim."""

    TRAINJOB_RUNTIME = TRAINJOB_RUNTIME

    def starts_processes(self, verb: str) -> bool:
        """Paddle's own launcher starts the workers that train."""
        return verb in ("prune", "quantize")

    # The stages are attested by this process; Paddle's only computes.
    @attested("prune", "model", "data")
    def prune(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "TrainResult":
        """Prune with PaddleSlim."""
        from lathe.train.result import read_result

        require_enabled("Prune", recipe.Compress.Prune.enable)
        start("prune", recipe, model, "--data", data, "--output", output)
        return read_result(output)

    @attested("quantize", "model", "data", "sensitivity")
    def quantize(
        self, recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
    ) -> "TrainResult":
        """Quantization-aware training with PaddleSlim."""
        from lathe.train.result import read_result

        require_enabled("Quantization", recipe.Compress.Quantization.enable)
        skips = ["--sensitivity", sensitivity] if sensitivity else []
        start("quantize", recipe, model, "--data", data, *skips, "--output", output)
        return read_result(output)

    @attested("analyze", "model", "data")
    def analyze(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "SensitivityResult":
        """Rank the linears by the cost of INT8, measured with Paddle."""
        from lathe.compress.sensitivity.result import read_analysis

        start("analyze", recipe, model, "--data", data, "--output", output)
        return read_analysis(output)

    @attested(
        "evaluate",
        *("model", "data", "cloze", "text", "tasks", "reference"),
        *("eval_path", "eval_tasks"),
    )
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
        """Measure a checkpoint with Paddle; exported files and servers are measured without it."""
        if endpoint or (Path(model) / EXPORT.metadata_file).is_file():
            return super().evaluate(
                recipe, model, output, data, cloze, text, endpoint, tasks, reference
            )
        if reference is not None:
            raise UserError(
                "the Paddle engine does not support --reference",
                "set -o Compress.engine=torch",
                Code.UNSUPPORTED,
            )
        from lathe.evaluate.evaluation_folder import read_metrics
        from lathe.evaluate.measure_model import read_result

        # Before Paddle is started, so that a folder that is taken is reported at once.
        claim_output_folder(
            output, EVALUATION, model, data, cloze, text, *(path for _, path in tasks)
        )
        inputs = {"--data": data, "--cloze": cloze, "--text": text}
        options = [part for name, path in inputs.items() if path for part in (name, path)]
        options += [part for name, path in tasks for part in ("--task", f"{name}={path}")]
        start("evaluate", recipe, model, *options, "--output", output)
        return read_result(output, read_metrics(output))

    def export(self, recipe: Recipe, model: Path, data: Path, output: Path) -> "ExportResult":
        """The proven ONNX export, and Paddle's own files beside it in the folder `paddle`."""
        from lathe.export.export import export

        def also(work: Path) -> dict[str, Any]:
            folder = work / "paddle"
            start("export", recipe, model, "--data", data, "--served", work, "--output", folder)
            metadata = (folder / PADDLE_EXPORT.metadata_file).read_text(encoding="utf-8")
            return {"paddle": json.loads(metadata)}

        return export(recipe, model, data, output, also)

    def check_environment(self) -> None:
        """Check that Paddle's environment exists."""
        find_python()

    def check_support(self, verb: str, recipe: Recipe, has_gpu: bool) -> None:
        """Refuse what Paddle or PaddleSlim cannot do."""
        require_supported(verb, recipe)
        if verb in ("prune", "quantize") and not has_gpu:
            require_no_gpu_needed(recipe)


PADDLE = PaddleBackend()
