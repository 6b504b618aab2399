"""The one scoring interface, and where a model may run behind it: torch or an ONNX file.

Shapes: B rows of T tokens, n targets, V vocabulary, k the most targets of a row.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lathe.model.gpt import GPT
from lathe.serve.session import OnnxModel

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time

Scores = tuple[NDArray[np.float64], NDArray[np.bool_]]


class Scorer(Protocol):
    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        """Score n target tokens; logits are computed at their positions and nowhere else.

        Args:
            tokens: (B, T) input ids, short rows padded on the right (the model is causal, so a
                pad changes nothing before it).
            rows, columns: (n,) positions in `tokens` whose next token is the target, `rows`
                ascending.
            targets: (n,) ids.

        Returns:
            (n,) natural log-likelihoods, and (n,) whether the target is the argmax.
        """


class TorchScorer:
    """A GPT on the device where it is.

    With `bfloat16` its blocks multiply in that type; the residual stream, which in a trained
    model spans more than its 8 bits, stays in float32, and so do the logits.
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


class OnnxScorer:
    """A folder that the export stage wrote, on the CPU.

    Raises:
        UserError: the folder is no export, or its graph is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.model = OnnxModel(folder, threads=torch.get_num_threads())

    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        """See `Scorer.score`."""
        counts = np.bincount(rows, minlength=len(tokens))
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.zeros((len(tokens), counts.max()), np.int64)  # (B, k)
        index[rows, places] = columns
        scores = []
        step = max(1, LOGIT_ROWS // index.shape[1])
        for first in range(0, len(tokens), step):
            part = slice(*np.searchsorted(rows, [first, first + step]))
            logits = self._logits(tokens[first : first + step], index[first : first + step])
            wanted = logits[rows[part] - first, places[part]]  # (n, V)
            scores.append(_of_targets(torch.from_numpy(wanted), targets[part]))
        return _joined(scores)

    def _logits(self, tokens: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.float32]:
        """(B, k, V) logits at the positions `index` (B, k)."""
        batch, length = tokens.shape
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": tokens,
            "position_ids": np.tile(np.arange(length), (batch, 1)),
            "seqlens_k": np.full(batch, length - 1, np.int32),
            "total_sequence_length": np.array(length, np.int32),
            "logits_index": index,
        }
        for i, n_head in enumerate(self.model.n_head):
            empty = np.zeros((batch, n_head, 0, self.model.head_dim), np.float32)
            feeds[f"past_key_{i}"] = feeds[f"past_value_{i}"] = empty
        (logits,) = self.model.session.run(["logits"], feeds)
        assert isinstance(logits, np.ndarray)
        return logits


def _of_targets(logits: Tensor, targets: NDArray[np.int64]) -> Scores:
    """Log-likelihood and argmax hit of each row's target; logits (n, V)."""
    logits = logits.float()
    wanted = torch.from_numpy(targets).to(logits.device)
    chosen = logits.gather(1, wanted[:, None])[:, 0]
    scores = chosen.double() - logits.logsumexp(1).double()
    return scores.cpu().numpy(), (logits.argmax(1) == wanted).cpu().numpy()


def _joined(parts: list[Scores]) -> Scores:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
