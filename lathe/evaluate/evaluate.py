"""The evaluate stage: measures a checkpoint, or its ONNX export, with the evaluation tasks."""

from collections.abc import Sequence
from pathlib import Path

from lathe.evaluate.measure_model import EvalResult, TaskOption, measure
from lathe.evaluate.open_model import open_model
from lathe_base.artifacts.kinds import EVALUATION
from lathe_base.config.settings import Recipe
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder


@attested(
    "evaluate",
    *("model", "data", "cloze", "text", "tasks", "reference"),
    *("eval_path", "eval_tasks"),
)
def evaluate(
    recipe: Recipe,
    model: Path | str,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    endpoint: str | None = None,
    tasks: Sequence[TaskOption] = (),
    reference: Path | str | None = None,
) -> EvalResult:
    """Measure `model` and write the folder `output`.

    It holds `metrics.json`, `examples.jsonl` (one cloze example per line), `blocks.jsonl` (one
    block of the text per line), `tasks/NAME.jsonl` for every other task, and for a checkpoint
    `samples.json` (continuations of prompts from the text). `lathe.evaluate.gate` compares models
    line by line.

    `model` is a checkpoint, HF GPT-2 or export folder; see `lathe.evaluate.open_model`. With
    `endpoint`, a gRPC address, the server's `Serving.model_name` is measured, which must be serving
    this export.

    The cloze set is `cloze` (LAMBADA-format JSONL), else `Offline_Eval.eval_path` if its name ends
    in .jsonl, else the held-out one of the `data` folder. The text is `text` (UTF-8), else
    `Offline_Eval.eval_path` with another name, else the held-out one of `data`. `tasks` and
    those of `Offline_Eval.tasks` are measured in addition.

    With `reference`, a checkpoint or export of the same vocabulary, the text's blocks also record
    top-1 agreement and KL divergence; see `lathe.evaluate.reference`.

    Raises:
        UserError: nothing to measure, a broken file, data prepared with a vocabulary other than
            the model's, or a model whose loss is not finite.
    """
    named = (task.partition("=")[2] for task in recipe.Offline_Eval.tasks)
    inputs = (model, data, cloze, text, reference, *(path for _, path in tasks), *named)
    claim_output_folder(output, EVALUATION, *inputs)
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    subject = open_model(model, recipe, served)
    beside = None if reference is None else open_model(reference, recipe)
    return measure(recipe, subject, output, data, cloze, text, tasks, beside)
