"""The evaluate stage: a checkpoint, or its ONNX file, measured by the evaluation tasks."""

from collections.abc import Sequence
from pathlib import Path

from lathe.artifacts.kinds import EVALUATION
from lathe.config.settings import Recipe
from lathe.evaluate.measure import EvalResult, GivenTask, measure
from lathe.evaluate.open_model import open_model
from lathe.storage import claim_output_folder


def evaluate(
    recipe: Recipe,
    model: Path | str,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    endpoint: str | None = None,
    tasks: Sequence[GivenTask] = (),
) -> EvalResult:
    """Measure `model`; write `metrics.json`, `examples.jsonl` (a cloze example a line),
    `blocks.jsonl` (a stretch of the text a line), `tasks/NAME.jsonl` for every other task and
    `samples.json` (continuations of prompts from the text, by a checkpoint only). By the lines
    `lathe.evaluate.gate` compares models.

    `model` is a checkpoint, HF GPT-2 or export folder; see `lathe.evaluate.open_model`. With
    `endpoint`, a gRPC address, the server's `Serving.model_name` is measured, which must be this
    export.

    What is measured: `cloze` (LAMBADA-format JSONL), `text` (UTF-8) and `tasks` where given, then
    `Offline_Eval.eval_path` (a cloze set if its name ends in .jsonl), then the held-out files of
    the `data` folder.

    Raises:
        UserError: nothing to measure, a broken file, data prepared with a vocabulary other than
            the model's, or a model whose loss is not finite.
    """
    claim_output_folder(output, EVALUATION, model, data, cloze, text, *(path for _, path in tasks))
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    return measure(recipe, open_model(model, recipe, served), output, data, cloze, text, tasks)
