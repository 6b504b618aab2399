"""What the server's side and the client's have in common: names, and what answers hold."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["", "stop", "length", "cancelled"]
TokenScores = tuple[NDArray[np.float64], NDArray[np.bool_]]  # log-likelihood, is it the argmax


@dataclass(frozen=True)
class Piece:
    """A part of a continuation, or all of it; `finish_reason` is empty until the last piece.

    stop: the model ended its text (EOS is in neither `text` nor `tokens`); length: `max_tokens` or
    the context was reached; cancelled: nobody waits for it any more.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason


def score_name(model_name: str) -> str:
    """The Triton model that scores by `model_name`."""
    return f"{model_name}-score"
