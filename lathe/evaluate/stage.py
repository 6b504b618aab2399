"""The evaluate stage: a checkpoint, or its ONNX file, measured on a cloze set and on a text."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lathe.data.tokenizer import load_tokenizer
from lathe.errors import UserError
from lathe.evaluate.lambada import (
    ClozeResult,
    ExampleScore,
    read_cloze,
    score_cloze,
    summarize_cloze,
)
from lathe.evaluate.results import BLOCKS, EXAMPLES, METRICS
from lathe.evaluate.samples import Sample, continue_prompts, held_out_prompts
from lathe.evaluate.subject import Subject, open_subject
from lathe.evaluate.wikitext import (
    BlockLoss,
    PerplexityResult,
    read_text,
    split_blocks,
    summarize_perplexity,
    token_losses,
)
from lathe.settings import OfflineEvalSettings, Recipe
from lathe.storage import atomic_folder, digest, sha256

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class EvalResult:
    """The figures of `metrics.json`; None where a measure was not taken."""

    folder: Path
    n_params: int
    n_bytes: int
    n_examples: int
    cloze_accuracy: float | None
    cloze_stderr: float | None
    perplexity: float | None
    perplexity_stderr: float | None
    adjusted_perplexity: float | None


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
    settings = recipe.Offline_Eval
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    subject = open_subject(model, settings, recipe.Global.device, served)
    if data is not None:
        _require_same_vocabulary(subject, data)
    cloze, text = _find_inputs(settings, data, cloze, text)

    seq_len = min(settings.max_seq_len, subject.config.n_positions)
    overlap = min(settings.overlapping_eval, seq_len)
    token_budget = subject.token_budget(settings.batch_size * seq_len)
    started = time.perf_counter()
    scores: list[ExampleScore] = []
    blocks: list[BlockLoss] = []
    cloze_result: ClozeResult | None = None
    text_result: PerplexityResult | None = None
    samples: list[Sample] = []
    if cloze is not None:
        examples = read_cloze(cloze, subject.tokenizer)
        scores = score_cloze(subject.scorer, examples, seq_len, token_budget)
        cloze_result = summarize_cloze(scores)
        _require_finite(cloze_result.log_likelihood, model)
    if text is not None:
        read = read_text(text, subject.tokenizer)
        losses = token_losses(subject.scorer, read.tokens, seq_len, overlap, token_budget)
        blocks = split_blocks(losses, seq_len)
        text_result = summarize_perplexity(blocks, read)
        _require_finite(text_result.loss, model)
        if subject.checkpoint and (prompts := held_out_prompts(text)):
            samples = continue_prompts(
                subject.checkpoint.model,
                subject.tokenizer,
                prompts,
                recipe.Generation,
                recipe.Global.seed,
                subject.checkpoint.eos_id,
            )

    metrics = {
        "model": subject.card(),
        "cloze": _json_ready(asdict(cloze_result)) if cloze_result else None,
        "text": _json_ready(asdict(text_result)) if text_result else None,
        "protocol": {
            "max_seq_len": seq_len,
            "overlapping_eval": overlap,
            "dtype": settings.dtype,
        },
        "sources": {"cloze": cloze and cloze.name, "text": text and text.name},
        "digests": {
            "cloze": cloze and sha256(cloze),
            "text": text and sha256(text),
            "tokenizer": digest(subject.tokenizer.to_str()),
            "model": subject.digest,
        },
        "seconds": round(time.perf_counter() - started, 3),
    }
    _write(output, metrics, scores, blocks, samples)
    result = _result(output, metrics)
    log.info("%s", _sentence(result))
    return result


def _find_inputs(
    settings: OfflineEvalSettings, data: Path | None, cloze: Path | None, text: Path | None
) -> tuple[Path | None, Path | None]:
    if settings.eval_path:
        named = Path(settings.eval_path)
        if named.suffix == ".jsonl":
            cloze = cloze or named
        else:
            text = text or named
    if data is not None:
        cloze = cloze or _held_out(data / "cloze.jsonl")
        text = text or _held_out(data / "heldout.txt")
    if not settings.cloze_eval:
        cloze = None
    if cloze is None and text is None:
        raise UserError(
            "nothing to evaluate on",
            "give a data folder with held-out documents, a cloze JSONL file or a text",
        )
    return cloze, text


def _held_out(path: Path) -> Path | None:
    if path.is_file() and path.stat().st_size:
        return path
    log.warning("%s is absent or empty (no test documents): not measured", path)
    return None


def _require_same_vocabulary(subject: Subject, data: Path) -> None:
    theirs, ours = load_tokenizer(data), subject.tokenizer
    if theirs.get_vocab() != ours.get_vocab():
        raise UserError(
            f"{data}: prepared with another vocabulary ({theirs.get_vocab_size()} ids) than "
            f"{subject.folder}'s ({ours.get_vocab_size()} ids)",
            "prepare the data with the model's tokenizer, or give the cloze and text files alone",
        )


def _require_finite(loss: float, model: Path | str) -> None:
    if not math.isfinite(loss):
        raise UserError(f"{model}: its loss is {loss}", "training diverged: use an earlier one")


def _json_ready(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a standard error that one unit cannot give is null."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def _write(
    output: Path,
    metrics: Mapping[str, Any],
    scores: Sequence[ExampleScore],
    blocks: Sequence[BlockLoss],
    samples: Sequence[Sample],
) -> None:
    with atomic_folder(output, METRICS) as work:
        for name, lines in ((EXAMPLES, scores), (BLOCKS, blocks)):
            text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
            (work / name).write_text(text)
        for name, values in (
            ("samples.json", [asdict(sample) for sample in samples]),
            (METRICS, metrics),
        ):
            text = json.dumps(values, indent=2, allow_nan=False)
            (work / name).write_text(text + "\n")


def _result(folder: Path, metrics: Mapping[str, Any]) -> EvalResult:
    cloze, text = metrics["cloze"] or {}, metrics["text"] or {}
    return EvalResult(
        folder=folder,
        n_params=metrics["model"]["n_params"],
        n_bytes=metrics["model"]["bytes"],
        n_examples=cloze.get("examples", 0),
        cloze_accuracy=cloze.get("accuracy"),
        cloze_stderr=cloze.get("accuracy_stderr"),
        perplexity=text.get("perplexity"),
        perplexity_stderr=text.get("perplexity_stderr"),
        adjusted_perplexity=text.get("adjusted_perplexity"),
    )


def _sentence(result: EvalResult) -> str:
    parts = []
    if result.cloze_accuracy is not None:
        error = f" ± {result.cloze_stderr:.2%}" if result.cloze_stderr is not None else ""
        parts.append(
            f"cloze accuracy {result.cloze_accuracy:.2%}{error} ({result.n_examples} examples)"
        )
    if result.perplexity is not None:
        error = f" ± {result.perplexity_stderr:.2f}" if result.perplexity_stderr else ""
        parts.append(f"perplexity {result.perplexity:.2f}{error}")
    return ", ".join(parts)
