"""A model in any framework measured on a cloze set and on a text."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.artifacts.kinds import EVALUATION
from lathe.config.settings import OfflineEvalSettings, Recipe
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import read_data_metadata
from lathe.errors import UserError
from lathe.evaluate.lambada import (
    ClozeResult,
    ExampleScore,
    read_cloze,
    score_cloze,
    summarize_cloze,
)
from lathe.evaluate.results import BLOCKS, EXAMPLES, METRICS
from lathe.evaluate.samples import Generate, Sample, continue_prompts, held_out_prompts
from lathe.evaluate.score import Scorer
from lathe.evaluate.wikitext import (
    BlockLoss,
    PerplexityResult,
    read_text,
    split_blocks,
    summarize_perplexity,
    token_losses,
)
from lathe.model.config import GPTConfig
from lathe.storage import atomic_folder, digest, sha256

log = logging.getLogger("lathe")

# Activations of more tokens fall out of a CPU's caches: a quarter slower for GPT-2 124M.
CPU_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class EvaluatedModel:
    """A model behind its scorer.

    Attributes:
        stage: what made it.
        n_bytes: size of its weights.
        on_cpu: where it computes.
        generate: continues prompts; None for what writes no samples.
        engine: the framework that computes.
    """

    folder: Path
    scorer: Scorer
    config: GPTConfig
    tokenizer: Tokenizer
    stage: str | None
    n_bytes: int
    digest: str
    on_cpu: bool = True
    generate: Generate | None = None
    engine: str = "torch"

    def token_budget(self, wanted: int) -> int:
        """Tokens of a batch, `wanted` at most."""
        return min(wanted, CPU_BATCH_TOKENS) if self.on_cpu else wanted

    def metadata(self) -> dict[str, Any]:
        """What `metrics.json` says of the model."""
        return {
            "stage": self.stage,
            "engine": self.engine,
            "n_params": self.config.n_params(),
            "bytes": self.n_bytes,
            "quantized": self.config.quantization is not None,
        }


@dataclass(frozen=True)
class EvalResult:
    """The figures of `metrics.json`; None where a measure was not taken.

    Attributes:
        last_token_accuracy: of the cloze set's words, by their last token alone.
        word_perplexity: of those words.
    """

    folder: Path
    n_params: int
    n_bytes: int
    n_examples: int
    cloze_accuracy: float | None
    cloze_stderr: float | None
    last_token_accuracy: float | None
    last_token_stderr: float | None
    word_perplexity: float | None
    word_perplexity_stderr: float | None
    perplexity: float | None
    perplexity_stderr: float | None
    adjusted_perplexity: float | None


def measure(
    recipe: Recipe,
    subject: EvaluatedModel,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
) -> EvalResult:
    """Measure `subject` and write the evaluation folder `output`; see
    `lathe.evaluate.evaluate.evaluate`."""
    settings = recipe.Offline_Eval
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
    examples = read_cloze(cloze, subject.tokenizer) if cloze is not None else []
    read = read_text(text, subject.tokenizer) if text is not None else None
    if examples:
        scores = score_cloze(subject.scorer, examples, seq_len, token_budget)
        cloze_result = summarize_cloze(scores)
        _require_finite(cloze_result.log_likelihood, subject.folder)
    if text is not None and read is not None:
        losses = token_losses(subject.scorer, read.tokens, seq_len, overlap, token_budget)
        blocks = split_blocks(losses, seq_len)
        text_result = summarize_perplexity(blocks, read)
        _require_finite(text_result.loss, subject.folder)
        if subject.generate and (prompts := held_out_prompts(text)):
            n_positions = subject.config.n_positions
            samples = continue_prompts(
                subject.generate, subject.tokenizer, n_positions, prompts, recipe.Generation
            )

    metrics = {
        "model": subject.metadata(),
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
    result = read_result(output, metrics)
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
        if not any((data / name).exists() for name in ("cloze.jsonl", "heldout.txt")):
            raise UserError(
                f"{data}: no cloze.jsonl and no heldout.txt",
                "give the folder that prepare wrote, or leave --data out",
            )
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


def _require_same_vocabulary(subject: EvaluatedModel, data: Path) -> None:
    read_data_metadata(data)
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
    with atomic_folder(output, EVALUATION) as work:
        for name, lines in ((EXAMPLES, scores), (BLOCKS, blocks)):
            text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
            (work / name).write_text(text, encoding="utf-8")
        for name, values in (
            ("samples.json", [asdict(sample) for sample in samples]),
            (METRICS, metrics),
        ):
            text = json.dumps(values, indent=2, allow_nan=False)
            (work / name).write_text(text + "\n", encoding="utf-8")


def read_result(folder: Path, metrics: Mapping[str, Any]) -> EvalResult:
    """The figures of an evaluation folder's `metrics.json`."""
    cloze, text = metrics["cloze"] or {}, metrics["text"] or {}
    return EvalResult(
        folder=folder,
        n_params=metrics["model"]["n_params"],
        n_bytes=metrics["model"]["bytes"],
        n_examples=cloze.get("examples", 0),
        cloze_accuracy=cloze.get("accuracy"),
        cloze_stderr=cloze.get("accuracy_stderr"),
        last_token_accuracy=cloze.get("last_token_accuracy"),
        last_token_stderr=cloze.get("last_token_accuracy_stderr"),
        word_perplexity=cloze.get("target_perplexity"),
        word_perplexity_stderr=cloze.get("target_perplexity_stderr"),
        perplexity=text.get("perplexity"),
        perplexity_stderr=text.get("perplexity_stderr"),
        adjusted_perplexity=text.get("adjusted_perplexity"),
    )


def _sentence(result: EvalResult) -> str:
    parts = []
    if result.cloze_accuracy is not None:
        error = f" ± {result.cloze_stderr:.2%}" if result.cloze_stderr is not None else ""
        last = result.last_token_accuracy
        last_token = f", {last:.2%} of the last tokens" if last is not None else ""
        parts.append(
            f"cloze accuracy {result.cloze_accuracy:.2%}{error}{last_token} "
            f"({result.n_examples} examples)"
        )
    if result.perplexity is not None:
        error = f" ± {result.perplexity_stderr:.2f}" if result.perplexity_stderr else ""
        parts.append(f"perplexity {result.perplexity:.2f}{error}")
    return ", ".join(parts)


def require_float32(settings: OfflineEvalSettings, what: str) -> None:
    """Raise UserError where `Offline_Eval.dtype` would change what is measured."""
    if settings.dtype != "float32":
        raise UserError(
            f"Offline_Eval.dtype is {settings.dtype}, and {what}", "set Offline_Eval.dtype=float32"
        )
