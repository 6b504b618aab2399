"""Open the model to evaluate, a checkpoint or an export, and its scorer: torch, an ONNX file or a
server.

Shapes: B rows of T tokens, n targets, V vocabulary, k maximum number of targets per row.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.answer_requests import Answerer
from lathe.evaluate.answerers import graph_answerer, served_answerer, torch_answerer
from lathe.evaluate.measure_model import EvaluatedModel, require_float32
from lathe.evaluate.score_requests import Scorer, Scores, Targets
from lathe.export.export import require_exportable
from lathe.export.export import write as write_export
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import read_config
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.train.workers import choose_device
from lathe_base.artifacts.kinds import open_export
from lathe_base.config.settings import ExportSettings, OfflineEvalSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.storage import sha256
from lathe_serving.client import Client
from lathe_serving.runtime.exported_model import MODEL, ExportedModel
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.open_model import open_model as open_in_runtime
from lathe_serving.runtime.protocol import TokenScores
from lathe_serving.runtime.score import score_tokens

log = logging.getLogger("lathe")

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time

Endpoint = tuple[str, str]  # gRPC address and model name


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
    onnx = Path(model) / MODEL
    if not onnx.is_file():
        if endpoint is not None:
            raise UserError(
                f"{onnx}: no such file", "give the export folder that is served", Code.NOT_FOUND
            )
        device = choose_device(recipe)
        return _open_checkpoint(load_checkpoint(model), settings, device, recipe.Global.seed)
    folder = onnx.parent
    open_export(folder)
    require_float32(settings, f"{folder} is an ONNX export, which has its own precision")
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


def _open_checkpoint(
    checkpoint: Checkpoint, settings: OfflineEvalSettings, device: torch.device, seed: int
) -> EvaluatedModel:
    net, graph = checkpoint.model, None
    if net.config.quantization is not None:
        require_float32(settings, f"{checkpoint.folder} is quantized, with scales for float32")
        if settings.quantized == "onnxruntime" and device.type == "cpu":
            graph = _graph_scorer(checkpoint)
    is_bfloat16 = settings.dtype == "bfloat16"
    log.info("evaluating on %s in %s", device, settings.dtype)
    torch_scorer = TorchScorer(net.to(device), is_bfloat16)

    @cache
    def answerers() -> tuple[Answerer, Answerer]:
        """A graph is faster on a CPU. That of a model in float is checked by torch's answers; torch
        computes a quantized one with other rounding."""
        rows, tokenizer = settings.batch_size, checkpoint.tokenizer
        in_torch = partial(torch_answerer, net, sorted(checkpoint.end_ids), bfloat16=is_bfloat16)
        exported, again = graph, None
        if net.config.quantization is None:
            again = in_torch(rows=other_rows(rows), is_reversed=True)
            if device.type == "cpu" and not is_bfloat16:
                exported = _graph_scorer(checkpoint)
        if exported is None:
            return in_torch(rows=rows), again or in_torch(rows=other_rows(rows), is_reversed=True)
        in_graph = partial(graph_answerer, exported.model, tokenizer)
        return in_graph(rows), again or in_graph(other_rows(rows), is_reversed=True)

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
        generate=lambda prompts, how: generate(net, prompts, how, checkpoint.end_ids, seed),
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
        with TemporaryDirectory() as folder:
            write_export(checkpoint, Path(folder), settings)
            return onnx_scorer(Path(folder))
    except UserError as error:
        log.info("%s: cannot be exported for evaluation: %s", checkpoint.folder, error.what)
        return None


class TorchScorer:
    """Scores with a torch GPT, on its device.

    With `bfloat16` the blocks multiply in that type. The residual stream stays in float32, because
    in a trained model it spans more than bfloat16's 8 bits; so do the logits.
    """

    def __init__(self, model: GPT, bfloat16: bool = False) -> None:
        self.model, self.bfloat16 = model, bfloat16
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        hidden, ids = self._hidden(targets), targets.ids
        scores = [
            _score_targets(self.model.head(hidden[i : i + LOGIT_ROWS]), ids[i : i + LOGIT_ROWS])
            for i in range(0, len(ids), LOGIT_ROWS)
        ]
        return _joined(scores)

    @torch.inference_mode()
    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """See `lathe.evaluate.reference.LogitScorer`."""
        found: NDArray[np.float32] = self.model.head(self._hidden(targets)).float().cpu().numpy()
        return found

    def _hidden(self, targets: Targets) -> Tensor:
        """Hidden states (n, C) at the positions."""
        arrays = (targets.tokens, targets.rows, targets.columns)
        tokens, rows, columns = (torch.from_numpy(x).to(self.device) for x in arrays)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.model.hidden(tokens)[rows, columns]


class IndexedScorer:
    """Scores with an exported folder or a server, which take a rectangle of targets per batch.

    Args:
        score_tokens: see `lathe_serving.runtime.score.score_tokens`.
    """

    def __init__(self, score_tokens: Callable[..., TokenScores]) -> None:
        self.score_tokens = score_tokens

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        index, places = _rectangle(targets)
        wanted = np.zeros_like(index)
        wanted[targets.rows, places] = targets.ids
        step = max(1, LOGIT_ROWS // index.shape[1])
        parts = [
            self.score_tokens(targets.tokens[part], index[part], wanted[part])
            for part in (slice(i, i + step) for i in range(0, len(index), step))
        ]
        likelihoods, greedy = _joined(parts)
        return likelihoods[targets.rows, places], greedy[targets.rows, places]


class OnnxScorer(IndexedScorer):
    """Scores with an exported graph in this process."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__(partial(score_tokens, model))
        self.model = model

    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """See `lathe.evaluate.reference.LogitScorer`."""
        index, places = _rectangle(targets)
        logits: NDArray[np.float32] = self.model.logits(targets.tokens, index=index)
        return logits[targets.rows, places]


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
    """The positions in every row, (B, k), padded with 0, and the index of each in its row, (n,)."""
    rows = targets.rows
    counts = np.bincount(rows, minlength=len(targets.tokens))
    # Targets are sorted by row: the place of each is its number minus that of the row's first.
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((len(targets.tokens), counts.max()), np.int64)
    index[rows, places] = targets.columns
    return index, places


def _score_targets(logits: Tensor, targets: NDArray[np.int64]) -> Scores:
    """Log-likelihood and argmax hit of each row's target; logits (n, V)."""
    logits = logits.float()
    wanted = torch.from_numpy(targets).to(logits.device)
    chosen = logits.gather(1, wanted[:, None])[:, 0]
    scores = chosen.double() - logits.logsumexp(1).double()
    return scores.cpu().numpy(), (logits.argmax(1) == wanted).cpu().numpy()


def _joined(parts: list[Scores]) -> Scores:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
