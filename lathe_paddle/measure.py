"""Metrics of a Paddle model on the validation batches, the same as in the torch engine.

See `lathe.compress.sensitivity.measure`.
"""

import math

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from lathe.train.batches import EvalBatches
from lathe_base.errors import UserError
from lathe_paddle.gpt import GPT

CHUNK_ELEMENTS = 2**24  # of the float64 logits that are held at a time


class Measure:
    """`measure(model)` is the metric of each of `batches`, a mean over its tokens.

    For `kl`, the final hidden states of the float model are kept: C floats per token.
    """

    def __init__(self, metric: str, batches: EvalBatches, float_model: GPT) -> None:
        self.metric, self.batches = metric, batches
        self.table = float_model.wte.weight.detach()
        self.reference: list[Tensor] = []  # a batch (B * T, C) each
        if metric == "kl":
            with paddle.no_grad():
                self.reference = [_hidden(float_model, tokens) for tokens in self._tokens()]

    @paddle.no_grad()
    def __call__(self, model: GPT) -> list[float]:
        """The metric of each batch; raises UserError if one is not finite."""
        values = []
        for i, tokens in enumerate(self._tokens()):
            hidden, targets = _hidden(model, tokens), tokens[:, 1:].flatten()
            value = self._of_batch(model, hidden, targets, i) / len(targets)
            if not math.isfinite(value):
                what = f"the model's {self.metric} is {value}"
                raise UserError(what, "use an earlier checkpoint")
            values.append(value)
        return values

    def _of_batch(self, model: GPT, hidden: Tensor, targets: Tensor, i: int) -> float:
        """The sum of the metric over the tokens of batch i."""
        total, n = 0.0, max(1, CHUNK_ELEMENTS // model.config.vocab_size)
        for start in range(0, len(targets), n):
            part = slice(start, start + n)
            logits = model.head(hidden[part])  # (n, V)
            if self.metric == "loss":
                total += float(F.cross_entropy(logits, targets[part], reduction="sum"))
            elif self.metric == "accuracy":
                total += int((logits.argmax(1) == targets[part]).sum())
            else:
                r = paddle.matmul(self.reference[i][part], self.table, transpose_y=True)
                p, q = _log_softmax(r), _log_softmax(logits)
                total += float((p.exp() * (p - q)).sum())
        return total

    def _tokens(self) -> list[Tensor]:
        """(B, T + 1) each."""
        return [paddle.to_tensor(self.batches[i]) for i in range(len(self.batches))]


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last axis, in float64; Paddle's own is forty times slower on a CPU."""
    wide = logits.astype("float64")
    return wide - paddle.logsumexp(wide, -1, keepdim=True)


def _hidden(model: GPT, tokens: Tensor) -> Tensor:
    return model.hidden(tokens[:, :-1]).flatten(0, 1)
