"""A checkpoint measured on a cloze set and on a text with Paddle."""

from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from lathe.evaluate.measure import EvalResult, Subject, measure
from lathe.evaluate.score import Scores
from lathe.model.folder import WEIGHTS
from lathe.paddle import fake_quant
from lathe.paddle.checkpoint import load_checkpoint
from lathe.paddle.gpt import GPT
from lathe.paddle.supported import require_supported
from lathe.paddle.workers import choose_device
from lathe.settings import Recipe

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time


def evaluate(
    recipe: Recipe,
    model: Path,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
) -> EvalResult:
    """See `lathe.evaluate.stage.evaluate`; a quantized checkpoint is read by PaddleSlim's fake
    quantization. No samples are written."""
    require_supported("evaluate", recipe)
    device = choose_device(recipe.Global.device)
    paddle.set_device(device)
    checkpoint = load_checkpoint(model)
    net, plan = checkpoint.model, checkpoint.model.config.quantization
    if plan is not None:
        fake_quant.insert(net, plan)
        net.eval()
    subject = Subject(
        folder=checkpoint.folder,
        scorer=PaddleScorer(net),
        config=net.config,
        tokenizer=checkpoint.tokenizer,
        stage=checkpoint.meta.get("stage"),
        n_bytes=(checkpoint.folder / WEIGHTS).stat().st_size,
        digest=checkpoint.digest,
        on_cpu=device == "cpu",
        engine="paddle",
    )
    return measure(recipe, subject, output, data, cloze, text)


class PaddleScorer:
    """See `lathe.evaluate.score.Scorer`."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    @paddle.no_grad()
    def score(
        self,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> Scores:
        hidden = self.model.hidden(paddle.to_tensor(tokens))  # (B, T, C)
        where = paddle.to_tensor(np.stack([rows, columns], axis=1))
        chosen = paddle.gather_nd(hidden, where)  # (n, C)
        parts = [
            _of_targets(self.model.head(chosen[i : i + LOGIT_ROWS]), targets[i : i + LOGIT_ROWS])
            for i in range(0, len(targets), LOGIT_ROWS)
        ]
        likelihoods, greedy = zip(*parts, strict=True)
        return np.concatenate(likelihoods), np.concatenate(greedy)


def _of_targets(logits: Tensor, targets: NDArray[np.int64]) -> Any:
    """Log-likelihood and argmax hit of each row's target; logits (n, V)."""
    wanted = paddle.to_tensor(targets)
    chosen = paddle.take_along_axis(logits, wanted.unsqueeze(1), 1).squeeze(1)
    scores = chosen.astype("float64") - paddle.logsumexp(logits, 1).astype("float64")
    return scores.numpy(), (logits.argmax(1) == wanted).numpy()
