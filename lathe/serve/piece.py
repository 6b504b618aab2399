"""What a generation yields, on the server's side and on the client's."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["", "stop", "length", "cancelled"]


@dataclass(frozen=True)
class Piece:
    """A part of a continuation, or all of it; `finish_reason` is empty until the last piece.

    stop: the model ended its text (EOS is in neither `text` nor `tokens`); length: `max_tokens` or
    the context was reached; cancelled: nobody waits for it any more.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
