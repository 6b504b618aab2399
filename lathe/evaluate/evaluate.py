"""The evaluate stage: measures a checkpoint, or its ONNX export, with the evaluation tasks.

A model is opened as what scores tokens and what generates answers: torch, an exported graph, or a
live server. Answers of a graph come from the server's own running batch
(`lathe_serving.runtime.batcher`), which replaces each finished answer by the next prompt and reads
a beginning that prompts share only once, so no row waits for the longest answer. That is why a
checkpoint on a CPU is exported to generate; on a GPU torch generates in batches.

Shapes: B rows of T tokens, n targets, V vocabulary, k maximum number of targets per row.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.measure_model import (
    EvalResult,
    EvaluatedModel,
    TaskOption,
    measure,
    require_float32,
)
from lathe.evaluate.scoring import Answerer, AnswerRequest, Scorer, Scores, Targets
from lathe.export.export import require_exportable
from lathe.export.export import write as write_export
from lathe.model.by_block import hidden_states, on
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import read_config
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.train.room import BY_BLOCK, WHOLE, device_with_room, pass_bytes, whole_bytes
from lathe.train.workers import choose_device, tensor_float32
from lathe_base.artifacts.kinds import EVALUATION, open_export
from lathe_base.config.settings import (
    ExportSettings,
    GenerationSettings,
    Recipe,
)
from lathe_base.config.settings.types import Precision
from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder, sha256
from lathe_serving.client import Client
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.exported_model import MODEL, ExportedModel
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.open_model import open_model as open_in_runtime
from lathe_serving.runtime.protocol import Chunk, TokenScores
from lathe_serving.runtime.score import score_tokens
from lathe_serving.runtime.sequence_group import Request, Samples, Vocabulary
from lathe_serving.runtime.text import TokenBytes, encode_prompts

log = logging.getLogger("lathe")

MAX_DIFFERENCE = 0.03
"""Limit of the mean difference of log-probabilities in another precision, nats per token: a third
of what the gate allows perplexity by default. SmolLM2-135M in bfloat16 has 0.018 on WikiText."""
LOGIT_ROWS = 1024
"""Positions whose (rows, V) logits are in memory at a time."""
PREFIX_BYTES = 1 << 28
"""Keys and values of shared beginnings, such as the examples before each question."""

Endpoint = tuple[str, str]  # gRPC address and model name
GeneratedAnswers = Iterator[tuple[int, list[int]]]  # see `Answerer.generate`


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

    `model` is a checkpoint, HF GPT-2 or export folder; see `open_model`. With `endpoint`, a gRPC
    address, the server's `Serving.model_name` is measured, which must be serving this export.

    The cloze set is `cloze` (LAMBADA-format JSONL), else `Offline_Eval.eval_path` if its name ends
    in .jsonl, else the held-out one of the `data` folder. The text is `text` (UTF-8), else
    `Offline_Eval.eval_path` with another name, else the held-out one of `data`. `tasks` and
    those of `Offline_Eval.tasks` are measured in addition.

    With `reference`, a checkpoint or export of the same vocabulary, the text's blocks also record
    top-1 agreement and KL divergence; see `lathe.evaluate.tasks.text.compare_text`.

    Raises:
        UserError: nothing to measure, a broken file, data prepared with a vocabulary other than
            the model's, or a model whose loss is not finite.
    """
    # Before anything is opened: an output that is one of the inputs would be overwritten.
    named = (task.partition("=")[2] for task in recipe.Offline_Eval.tasks)
    inputs = (model, data, cloze, text, reference, *(path for _, path in tasks), *named)
    claim_output_folder(output, EVALUATION, *inputs)
    served = (endpoint, recipe.Serving.model_name) if endpoint else None
    subject = open_model(model, recipe, served)
    beside = None
    if reference is not None:  # which is what others are measured by
        exact = recipe.Offline_Eval.model_copy(update={"dtype": "float32"})
        beside = open_model(reference, recipe.model_copy(update={"Offline_Eval": exact}))
    return measure(recipe, subject, output, data, cloze, text, tasks, beside)


def open_model(
    model: Path | str, recipe: Recipe, endpoint: Endpoint | None = None
) -> EvaluatedModel:
    """Open an export with onnxruntime and any other folder with torch; a quantized checkpoint also
    with onnxruntime, unless `Offline_Eval.quantized` is `simulated`.

    Args:
        endpoint: evaluate a server's model; `model` is then the export that it should serve.

    Raises:
        UserError: neither a checkpoint nor an export, no such device, or an unsupported precision.
    """
    settings = recipe.Offline_Eval
    # An export is a folder with a graph; anything else is a checkpoint, or a name on the Hub.
    onnx = Path(model) / MODEL
    if not onnx.is_file():
        if endpoint is not None:
            raise UserError(
                f"{onnx}: no such file", "give the export folder that is served", Code.NOT_FOUND
            )
        return _open_checkpoint(recipe, load_checkpoint(model))

    folder = onnx.parent
    open_export(folder)
    require_float32(settings, f"{folder} is an ONNX export, which has its own precision")
    # The digest names the evaluated model, and is what a server has to confirm.
    digest, tokenizer, rows = sha256(onnx), load_tokenizer(folder), settings.batch_size
    scorer: Scorer
    if endpoint:
        scorer, client = served_scorer(*endpoint, digest), Client(*endpoint)
        answerer = partial(served_answerer, client, tokenizer)
    else:
        scorer = onnx_scorer(folder, settings.runtime)
        answerer = partial(graph_answerer, scorer.model, tokenizer)
    return EvaluatedModel(
        folder=folder,
        scorer=scorer,
        config=read_config(folder),
        tokenizer=tokenizer,
        stage="export",
        engine=REFERENCE_RUNTIME if endpoint else settings.runtime,
        n_bytes=onnx.stat().st_size,
        digest=digest,
        answerers=lambda: (answerer(rows), answerer(other_rows(rows), is_reversed=True)),
    )


def _open_checkpoint(recipe: Recipe, checkpoint: Checkpoint) -> EvaluatedModel:
    settings, net, graph = recipe.Offline_Eval, checkpoint.model, None
    tokens = settings.batch_size * min(settings.max_seq_len, net.config.n_positions)
    needs = {WHOLE: whole_bytes(net, tokens), BY_BLOCK: pass_bytes(net, tokens)}
    device, way = device_with_room(recipe, choose_device(recipe), "evaluation", needs)
    if way == WHOLE:
        net.to(device)
    elif device.type != "cpu":  # for a token at a time, all weights would be moved
        log.warning("evaluation: text is generated on the CPU")
    # Fake quantization computes the rounding of an INT8 graph in float, step by step; the graph
    # itself is what will be served, and faster.
    if net.config.quantization is not None:
        require_float32(settings, f"{checkpoint.folder} is quantized, with scales for float32")
        if settings.quantized == "onnxruntime" and device.type == "cpu":
            graph = _graph_scorer(checkpoint)
    torch_scorer = TorchScorer(net, device, settings.dtype)

    @cache
    def answerers() -> tuple[Answerer, Answerer]:
        """A graph is faster on a CPU. That of a model in float is checked by torch's answers; torch
        computes a quantized one with other rounding."""
        is_float, exported = net.config.quantization is None, graph
        precision, ends = torch_scorer.precision, sorted(checkpoint.end_ids)
        if is_float and net.embedding.weight.device.type == "cpu" and precision == "float32":
            exported = _graph_scorer(checkpoint)
        in_torch = partial(torch_answerer, net, ends, precision=precision)
        first = again = in_torch
        if exported is not None:
            first = partial(graph_answerer, exported.model, checkpoint.tokenizer)
            again = in_torch if is_float else first
        rows = settings.batch_size
        return first(rows=rows), again(rows=other_rows(rows), is_reversed=True)

    return EvaluatedModel(
        folder=checkpoint.folder,
        scorer=graph or torch_scorer,
        engine=REFERENCE_RUNTIME if graph else "torch",
        config=net.config,
        tokenizer=checkpoint.tokenizer,
        stage=checkpoint.meta.get("stage"),
        n_bytes=checkpoint.source.n_bytes,
        digest=checkpoint.digest,
        on_cpu=device.type == "cpu",
        precision=lambda: torch_scorer.precision,
        generate=lambda prompts, how: generate(
            net, prompts, how, checkpoint.end_ids, recipe.Global.seed
        ),
        answerers=answerers,
    )


def other_rows(rows: int) -> int:
    """The batch size of a second run: every answer shares its steps with fewer others."""
    return max(rows // 2, 1) if rows > 1 else 2


def _graph_scorer(checkpoint: Checkpoint) -> "OnnxScorer | None":
    """A scorer with the checkpoint's exported graph, which is not verified here; None if it cannot
    be exported."""
    settings = ExportSettings()
    try:
        require_exportable(checkpoint.folder, checkpoint.model.config, settings)
        # The folder may go once the runtime has loaded the graph.
        with TemporaryDirectory() as folder:
            write_export(checkpoint, Path(folder), settings)
            return onnx_scorer(Path(folder))
    except UserError as error:
        log.info("%s: cannot be exported for evaluation: %s", checkpoint.folder, error.what)
        return None


class TorchScorer:
    """Scores with a torch GPT on a device; a model that is elsewhere, block by block.

    In bfloat16 and TF32 the blocks multiply in that type. The residual stream stays in float32,
    because in a trained model it spans more than bfloat16's 8 bits; so do the logits.

    Attributes:
        precision: the requested one, unless `settle_precision` has found that it is not close
            enough to float32.
    """

    def __init__(
        self, model: GPT, device: torch.device | None = None, precision: Precision = "float32"
    ) -> None:
        self.model, self.precision = model, precision
        self.device = device or next(model.parameters()).device
        self._is_settled = precision == "float32"

    def settle_precision(
        self, targets: Targets, recall: Callable[[Callable[[], int]], int]
    ) -> None:
        """See `lathe.evaluate.scoring.PreciseScorer`: the test is that log-probabilities of the
        first batch differ by at most `MAX_DIFFERENCE` on average."""
        if self._is_settled:
            return
        self._is_settled = True
        if self.precision == "tf32" and self.device.type != "cuda":
            log.warning("evaluating in float32: only GPUs have TF32")
            self.precision = "float32"
        elif not recall(lambda: int(self._is_close(targets))):
            log.warning("evaluating in float32, because %s is too far from it", self.precision)
            self.precision = "float32"

    def _is_close(self, targets: Targets) -> bool:
        """Whether the precision's log-probabilities are close to float32's, which is logged."""
        precision, difference = self.precision, math.nan
        if len(targets.ids):
            rounded, _ = self.score(targets)
            self.precision = "float32"
            difference = float(np.abs(rounded - self.score(targets)[0]).mean())
            self.precision = precision
        log.info(
            "%s: log-probabilities of the first batch differ from float32's by %.2g nats per "
            "token (limit %g)",
            *(precision, difference, MAX_DIFFERENCE),
        )
        return difference <= MAX_DIFFERENCE

    @torch.inference_mode()
    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        hidden = self._hidden(targets)
        ids = torch.from_numpy(targets.ids).to(self.device)
        likelihoods, greedy = [], []
        with on(self.device, self.model.output, self.model.head_input):
            for i in range(0, len(ids), LOGIT_ROWS):
                logits = self.model.head(hidden[i : i + LOGIT_ROWS]).float()
                wanted = ids[i : i + LOGIT_ROWS]
                chosen = logits.gather(1, wanted[:, None])[:, 0]
                # In float64 only from here on: the difference of two large numbers that are close.
                likelihoods.append((chosen.double() - logits.logsumexp(1).double()).cpu().numpy())
                greedy.append((logits.argmax(1) == wanted).cpu().numpy())
        return np.concatenate(likelihoods), np.concatenate(greedy)

    @torch.inference_mode()
    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """See `lathe.evaluate.tasks.text.LogitScorer`."""
        hidden = self._hidden(targets)
        with on(self.device, self.model.output, self.model.head_input):
            logits: NDArray[np.float32] = self.model.head(hidden).float().cpu().numpy()
        return logits

    def _hidden(self, targets: Targets) -> Tensor:
        """Hidden states (n, C) at the positions."""
        # The head is applied to the n targets only, not to all B * T positions.
        arrays = (targets.tokens, targets.rows, targets.columns)
        tokens, rows, columns = (torch.from_numpy(x).to(self.device) for x in arrays)
        with in_precision(self.precision, self.device):
            return hidden_states(self.model, [tokens])[0][rows, columns]


@contextmanager
def in_precision(
    precision: Precision, device: torch.device, keeps_weights: bool = False
) -> Iterator[None]:
    """Let a model's products be computed in a precision for the duration of a `with` block.

    Args:
        keeps_weights: whether to keep the rounded weights of all blocks until it ends, for models
            that are called more than once in it.
    """
    with ExitStack() as stack:
        if precision == "tf32":
            stack.enter_context(tensor_float32(device))
        is_half = precision == "bfloat16"
        autocast = torch.autocast(device.type, torch.bfloat16, is_half, keeps_weights)
        stack.enter_context(autocast)
        yield


class IndexedScorer:
    """Scores with an exported folder or a server, which take a rectangle of targets per batch.

    Args:
        score_tokens: see `lathe_serving.runtime.score.score_tokens`.
    """

    def __init__(self, score_tokens: Callable[..., TokenScores]) -> None:
        self.score_tokens = score_tokens

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        index, ranks = _rectangle(targets)
        wanted = np.zeros_like(index)
        wanted[targets.rows, ranks] = targets.ids
        step = max(1, LOGIT_ROWS // index.shape[1])  # whole rows, of k positions each
        parts = [
            self.score_tokens(targets.tokens[part], index[part], wanted[part])
            for part in (slice(i, i + step) for i in range(0, len(index), step))
        ]
        likelihoods = np.concatenate([part[0] for part in parts])
        greedy = np.concatenate([part[1] for part in parts])
        # (B, k) with padding back to (n,)
        return likelihoods[targets.rows, ranks], greedy[targets.rows, ranks]


class OnnxScorer(IndexedScorer):
    """Scores with an exported graph in this process."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__(partial(score_tokens, model))
        self.model = model

    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """See `lathe.evaluate.tasks.text.LogitScorer`."""
        index, ranks = _rectangle(targets)
        logits: NDArray[np.float32] = self.model.logits(targets.tokens, index=index)
        return logits[targets.rows, ranks]


def onnx_scorer(folder: Path, runtime: str = REFERENCE_RUNTIME) -> OnnxScorer:
    """The scorer of a folder that the export stage wrote, on the CPU.

    Raises:
        UserError: the folder is not an export, its graph is corrupt, or the runtime computes
            different logits.
    """
    return OnnxScorer(open_in_runtime(folder, torch.get_num_threads(), runtime).model)


def served_scorer(url: str, model_name: str, digest: str) -> IndexedScorer:
    """The scorer of a live Triton endpoint.

    Args:
        url: its gRPC address, `host:port`.
        digest: SHA-256 of the `model.onnx` that it is meant to serve.

    Raises:
        UserError: no server answers, or it serves another model.
    """
    client = Client(url, model_name)
    served = client.served_digest()
    if served != digest:
        raise UserError(
            f"{url} serves a {model_name} of SHA-256 {served[:12]}, not {digest[:12]}",
            "deploy this export, or give the folder of the export that is served",
            Code.MISMATCH,
        )
    return IndexedScorer(client.score)


def _rectangle(targets: Targets) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions in every row, (B, k), padded with 0, and the rank of each in its row, (n,)."""
    rows = targets.rows
    counts = np.bincount(rows, minlength=len(targets.tokens))
    # Targets are sorted by row: the rank of each is its number minus that of the row's first.
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((len(targets.tokens), counts.max()), np.int64)
    index[rows, ranks] = targets.columns
    return index, ranks


def graph_answerer(
    model: ExportedModel, tokenizer: Tokenizer, rows: int, is_reversed: bool = False
) -> Answerer:
    """Generates with an exported graph.

    Args:
        rows: answers at a time.
        is_reversed: whether the last request is the first to be answered.
    """

    def run(requests: Sequence[AnswerRequest]) -> GeneratedAnswers:
        vocabulary = Vocabulary(model.vocab_size, model.end_ids, TokenBytes(tokenizer))
        # The batcher computes on a thread of its own, which puts every chunk of every answer here.
        chunks: SimpleQueue[tuple[int, Chunk | Exception]] = SimpleQueue()
        groups = []
        for i, one in _in_order(requests, is_reversed):
            params = Params(decode_strategy="greedy_search", min_tokens=0, stop=one.stop)
            receiver = Receiver(lambda chunk, i=i: chunks.put((i, chunk)), lambda: False)  # type: ignore[misc]
            groups.append(
                Samples(Request(one.prompt, one.max_tokens, params, vocabulary, receiver))
            )
        # All requests are queued at once, so the queue is as long as they are many.
        batcher = Batcher(model, min(rows, max(len(groups), 1)), len(groups), PREFIX_BYTES)
        try:
            batcher.submit(*groups)
            answers: dict[int, list[int]] = {i: [] for i in range(len(requests))}
            # Answers are yielded as they are finished, so that a kill loses only the unfinished
            # ones.
            while answers:
                i, chunk = chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                answers[i] += chunk.tokens
                if chunk.finish_reason:
                    yield i, answers.pop(i)
        finally:
            batcher.close()

    return Answerer(_runtime_label(model.runtime, rows, is_reversed), run)


def torch_answerer(
    model: GPT,
    end_ids: Sequence[int],
    rows: int,
    precision: Precision = "float32",
    is_reversed: bool = False,
) -> Answerer:
    """Generates with torch, in batches of prompts of similar length; see `graph_answerer`."""
    device = next(model.parameters()).device

    def run(requests: Sequence[AnswerRequest]) -> GeneratedAnswers:
        # By length, because prompts are padded to the longest of their batch.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        if is_reversed:
            order.reverse()
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            prompts = [requests[i].prompt for i in batch]
            # The whole batch generates up to the largest limit; shorter ones are cut below.
            longest = max(requests[i].max_tokens for i in batch)
            how = GenerationSettings(
                decode_strategy="greedy_search", max_dec_len=longest, min_dec_len=0
            )
            with in_precision(precision, device, keeps_weights=True):
                answers = generate(model, prompts, how, end_ids)
            for i, ids in zip(batch, answers, strict=True):
                yield i, ids[: requests[i].max_tokens]

    return Answerer(_runtime_label(f"torch on {device.type}", rows, is_reversed), run)


def served_answerer(
    client: Client, tokenizer: Tokenizer, rows: int, is_reversed: bool = False
) -> Answerer:
    """Generates with a live server, which gets the prompts as texts; see `graph_answerer`."""

    def ask(request: AnswerRequest) -> list[int]:
        # A server takes text, which has to become the same ids again.
        text = tokenizer.decode(request.prompt, skip_special_tokens=False)
        if encode_prompts(tokenizer, [text])[0] != request.prompt:
            raise UserError(
                f"a server cannot be sent the prompt {text[:60]!r}, which contains the text of a "
                "special token",
                "evaluate the export itself, without --endpoint",
                Code.UNSUPPORTED,
            )
        limits = {"max_tokens": request.max_tokens, "min_tokens": 0}
        return client.generate(text, decode_strategy="greedy_search", **limits).tokens

    def run(requests: Sequence[AnswerRequest]) -> GeneratedAnswers:
        with ThreadPoolExecutor(rows) as pool:
            futures = {pool.submit(ask, one): i for i, one in _in_order(requests, is_reversed)}
            for done in as_completed(futures):
                yield futures[done], done.result()

    return Answerer(_runtime_label("the server", rows, is_reversed), run)


def _in_order(
    requests: Sequence[AnswerRequest], is_reversed: bool
) -> list[tuple[int, AnswerRequest]]:
    order = list(enumerate(requests))
    return order[::-1] if is_reversed else order


def _runtime_label(runtime: str, rows: int, is_reversed: bool) -> str:
    return f"{runtime}, {rows} at a time{', in reverse order' if is_reversed else ''}"
