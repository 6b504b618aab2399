"""The evaluate stage: a checkpoint, or its ONNX file, measured on a cloze set and on a text."""

from pathlib import Path

from lathe.artifacts.kinds import EVALUATION
from lathe.config.settings import Recipe
from lathe.engines.paddle import start as start_paddle
from lathe.evaluate.measure import EvalResult, measure, read_result
from lathe.evaluate.results import read_metrics
from lathe.evaluate.subject import open_subject
from lathe.runtime.session import MODEL
from lathe.storage import claim_folder


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

    `model` is a checkpoint, HF GPT-2 or export folder; see `lathe.evaluate.subject`. With
    `endpoint`, a gRPC address, the server's `Serving.model_name` is measured, which must be this
    export.

    What is measured: `cloze` (LAMBADA-format JSONL) and `text` (UTF-8) where given, then
    `Offline_Eval.eval_path` (a cloze set if its name ends in .jsonl), then the held-out files of
    the `data` folder.

    Raises:
        UserError: nothing to measure, a broken file, data prepared with a vocabulary other than
            the model's, or a model whose loss is not finite.
    """
    claim_folder(output, EVALUATION, model, data, cloze, text)
    if recipe.Compress.engine == "paddle" and not (endpoint or (Path(model) / MODEL).is_file()):
        given = {"--data": data, "--cloze": cloze, "--text": text}
        options = [part for name, path in given.items() if path for part in (name, path)]
        start_paddle("evaluate", recipe, model, *options, "--output", output)
        return read_result(output, read_metrics(output))
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    return measure(recipe, open_subject(model, recipe, served), output, data, cloze, text)
