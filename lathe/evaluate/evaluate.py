"""The evaluate stage: a checkpoint, or its ONNX file, measured on a cloze set and on a text."""

from pathlib import Path

from lathe.artifacts.kinds import EVALUATION
from lathe.config.settings import Recipe
from lathe.evaluate.measure import EvalResult, measure
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
) -> EvalResult:
    """Measure `model`; write `metrics.json`, `examples.jsonl` (a cloze example a line),
    `blocks.jsonl` (a stretch of the text a line) and `samples.json` (continuations of prompts
    from the text, by a checkpoint only). By the lines `lathe.evaluate.gate` compares models.

    `model` is a checkpoint, HF GPT-2 or export folder; see `lathe.evaluate.open_model`. With
    `endpoint`, a gRPC address, the server's `Serving.model_name` is measured, which must be this
    export.

    What is measured: `cloze` (LAMBADA-format JSONL) and `text` (UTF-8) where given, then
    `Offline_Eval.eval_path` (a cloze set if its name ends in .jsonl), then the held-out files of
    the `data` folder.

    Raises:
        UserError: nothing to measure, a broken file, data prepared with a vocabulary other than
            the model's, or a model whose loss is not finite.
    """
    claim_output_folder(output, EVALUATION, model, data, cloze, text)
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    return measure(recipe, open_model(model, recipe, served), output, data, cloze, text)
