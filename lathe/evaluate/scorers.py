"""Implementations of `Scorer`: torch, an ONNX file, a server.

Shapes: B rows of T tokens, n targets, V vocabulary, k the most targets in a row.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lathe.errors import UserError
from lathe.evaluate.score import Scores
from lathe.model.gpt import GPT
from lathe.runtime.protocol import TokenScores
from lathe.runtime.score import score_tokens
from lathe.runtime.session import OnnxModel
from lathe.serve.client import Client

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time


class TorchScorer:
    """Scores with a torch GPT, on the device where it is.

    With `bfloat16` the blocks multiply in that type. The residual stream stays in float32, because
    in a trained model it spans more than bfloat16's 8 bits; so do the logits.
    """

    def __init__(self, model: GPT, bfloat16: bool = False) -> None:
        self.model, self.bfloat16 = model, bfloat16
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        """See `Scorer.score`."""
        t, r, c = (torch.from_numpy(x).to(self.device) for x in (tokens, rows, columns))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.hidden(t)[r, c]  # (n, C)
        scores = [
            _of_targets(self.model.head(hidden[i : i + LOGIT_ROWS]), targets[i : i + LOGIT_ROWS])
            for i in range(0, len(targets), LOGIT_ROWS)
        ]
        return _joined(scores)

    @torch.inference_mode()
    def logits(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """See `lathe.evaluate.reference.Distribution`."""
        t, r, c = (torch.from_numpy(x).to(self.device) for x in (tokens, rows, columns))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.hidden(t)[r, c]
        found: NDArray[np.float32] = self.model.head(hidden).float().cpu().numpy()
        return found


class IndexedScorer:
    """Scores with an exported folder or a server, which take a rectangle of targets per batch.

    Args:
        score_tokens: see `lathe.runtime.score.score_tokens`.
    """

    def __init__(self, score_tokens: Callable[..., TokenScores]) -> None:
        self.score_tokens = score_tokens

    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        """See `Scorer.score`."""
        index, places = _rectangle(len(tokens), rows, columns)
        wanted = np.zeros_like(index)
        wanted[rows, places] = targets
        step = max(1, LOGIT_ROWS // index.shape[1])
        parts = [
            self.score_tokens(tokens[part], index[part], wanted[part])
            for part in (slice(i, i + step) for i in range(0, len(tokens), step))
        ]
        likelihoods, greedy = _joined(parts)
        return likelihoods[rows, places], greedy[rows, places]


class OnnxScorer(IndexedScorer):
    """Scores with an exported graph in this process."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(partial(score_tokens, model))
        self.model = model

    def logits(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """See `lathe.evaluate.reference.Distribution`."""
        index, places = _rectangle(len(tokens), rows, columns)
        found: NDArray[np.float32] = self.model.logits(tokens, index=index)[rows, places]
        return found


def onnx_scorer(folder: Path) -> OnnxScorer:
    """The scorer of a folder that the export stage wrote, on the CPU.

    Raises:
        UserError: the folder is not an export, or its graph is damaged.
    """
    return OnnxScorer(OnnxModel(folder, torch.get_num_threads()))


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
            "deploy this export, or give the folder of the one that is served",
        )
    return IndexedScorer(client.score)


def _rectangle(
    n_rows: int, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions in every row, (B, k), padded with 0, and (n,) the place of each in its row."""
    counts = np.bincount(rows, minlength=n_rows)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((n_rows, counts.max()), np.int64)
    index[rows, places] = columns
    return index, places


def _of_targets(logits: Tensor, targets: NDArray[np.int64]) -> Scores:
    """Log-likelihood and argmax hit of each row's target; logits (n, V)."""
    logits = logits.float()
    wanted = torch.from_numpy(targets).to(logits.device)
    chosen = logits.gather(1, wanted[:, None])[:, 0]
    scores = chosen.double() - logits.logsumexp(1).double()
    return scores.cpu().numpy(), (logits.argmax(1) == wanted).cpu().numpy()


def _joined(parts: list[Scores]) -> Scores:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
