"""The stages in PaddlePaddle; each runs as a process in Paddle's own environment."""

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lathe.backends.paddle_process import find_python, start
from lathe.backends.paddle_support import require_no_gpu_needed, require_supported
from lathe.backends.torch_backend import Backend
from lathe.compress.feasible import require_enabled
from lathe.compress.sensitivity.result import read_analysis
from lathe.train.result import read_result as read_training
from lathe_base.artifacts.kinds import EVALUATION, EXPORT, PADDLE_EXPORT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder

if TYPE_CHECKING:
    from lathe.evaluate.measure_model import EvalResult, TaskOption
    from lathe.export.export import ExportResult

TRAINJOB_RUNTIME = "lathe-paddle"

GROUPS = {"prune": "Prune", "quantize": "Quantization"}
"""Stages that a recipe may disable, and their groups in it."""

P = ParamSpec("P")
R = TypeVar("R")


def in_paddle(stage: Callable[P, R], read: Callable[[Path], R]) -> Callable[P, R]:
    """Run a stage in Paddle's environment, with its arguments as options of the same names.

    Args:
        stage: the method of `Backend`, whose signature the result has.
        read: reads the result from the output folder.
    """
    verb, signature = stage.__name__, inspect.signature(stage)

    @functools.wraps(stage)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        recipe, model = given["recipe"], given["model"]
        if verb in GROUPS:
            require_enabled(GROUPS[verb], getattr(recipe.Compress, GROUPS[verb]).enable)
        options = {n: x for n, x in given.items() if x and n not in ("self", "recipe", "model")}
        start(verb, recipe, model, *(part for n, x in options.items() for part in (f"--{n}", x)))
        return read(given["output"])

    return run


class PaddleBackend(Backend):
    """The stages of PaddlePaddle and PaddleSlim."""

    TRAINJOB_RUNTIME = TRAINJOB_RUNTIME

    def starts_processes(self, verb: str) -> bool:
        """Paddle's own launcher starts the workers that train."""
        return verb in ("prune", "quantize")

    # The stages are attested by this process; Paddle's only computes.
    prune = attested("prune", "model", "data")(in_paddle(Backend.prune, read_training))
    quantize = attested("quantize", "model", "data", "sensitivity")(
        in_paddle(Backend.quantize, read_training)
    )
    analyze = attested("analyze", "model", "data")(in_paddle(Backend.analyze, read_analysis))

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
