"""Metrics of a model on the validation batches.

Shapes: B batch, T tokens, C hidden size, V vocabulary, n tokens of a chunk.

`loss` determines perplexity, but what INT8 in one linear adds to it is small compared with its
variation between tokens, so with few tokens the ranking is noise. `kl` compares whole distributions
and is never negative, so it needs far fewer tokens for the same ranking.

`accuracy` is that of the next token at every position, not on cloze passages. It needs one forward
pass instead of many, has a smaller standard error because every position counts, and does not use
the test documents, on which the gate will decide: choosing layers by them would bias it.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lathe.model.gpt import GPT
from lathe.train.batches import EvalBatches
from lathe.train.chunks import CHUNK_ELEMENTS
from lathe.train.loss import next_token_loss
from lathe_base.config.settings.types import SensitivityMetric
from lathe_base.errors import Code, UserError


class BatchMetric:
    """`metric(model)` is the metric of every one of `batches` (B, T + 1), a mean over its tokens;
    all batches have equally many, so that the mean of means is the mean over all tokens.

    `kl` is the mean KL(float || model) of the next-token distributions, nats per token. It keeps
    the final hidden states of the float model: C floats per token.
    """

    def __init__(
        self,
        metric: SensitivityMetric,
        batches: EvalBatches | Sequence[NDArray[np.int64]],
        float_model: GPT,
    ) -> None:
        self.metric, self.batches = metric, batches
        self.table = float_model.output.weight
        self.reference: list[Tensor] = []  # a batch (B * T, C) each
        if metric == "kl":
            with torch.no_grad():
                self.reference = [
                    float_model.hidden(tokens[:, :-1]).flatten(0, 1) for tokens in self._tokens()
                ]

    @torch.no_grad()
    def __call__(self, model: GPT) -> list[float]:
        """Measure a model; raises UserError if a value is not finite."""
        values = []
        for i, tokens in enumerate(self._tokens()):
            n = tokens[:, 1:].numel()
            if self.metric == "loss":
                value = float(next_token_loss(model, tokens))
            elif self.metric == "accuracy":
                hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
                rows, targets = _rows(model), tokens[:, 1:].flatten()
                chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
                value = sum(int((model.head(h).argmax(1) == t).sum()) for h, t in chunks) / n
            else:
                hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
                value = _divergence(model, hidden, self.table, self.reference[i]) / n
            if not math.isfinite(value):
                what = f"the model's {self.metric} is {value}"
                raise UserError(what, "use an earlier checkpoint", Code.NOT_FINITE)
            values.append(value)
        return values

    def _tokens(self) -> Iterator[Tensor]:
        """(B, T + 1) each."""
        for i in range(len(self.batches)):
            yield torch.from_numpy(self.batches[i]).to(self.table.device)


def _divergence(model: GPT, hidden: Tensor, table: Tensor, reference: Tensor) -> float:
    """Sum over tokens of KL(reference || model), nats.

    Computed in float64 from the logits on: float32 rounding of log-probabilities is a first-order
    error, and KL is of second order in the difference.

    Args:
        hidden, reference: (N, C) final hidden states of `model` and of the float model.
        table: (V, C) head of the float model.
    """
    total, n = 0.0, _rows(model)
    for h, r in zip(torch.split(hidden, n), torch.split(reference, n), strict=True):
        q = model.head(h).double().log_softmax(1)  # (n, V)
        p = F.linear(r, table).double().log_softmax(1)
        total += float(F.kl_div(q, p, reduction="sum", log_target=True))
    return total


def _rows(model: GPT) -> int:
    """Number of tokens whose logits are in memory at a time: four buffers, in float64."""
    return max(1, CHUNK_ELEMENTS // (8 * model.config.vocab_size))
