"""What the server's side and the client's have in common: names, and what answers hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.errors import UserError

FinishReason = Literal["", "stop", "length", "timeout", "cancelled"]
# What the model that scores takes: either all of these, or all of those.
TOKENS = ("tokens", "index", "targets")
TEXTS = ("text_input", "continuation")
TokenScores = tuple[NDArray[np.float64], NDArray[np.bool_]]  # log-likelihood, is it the argmax


@dataclass(frozen=True)
class Chunk:
    """A part of a continuation, or all of it; `finish_reason` is empty until the last chunk.

    stop: the model ended its text (EOS is in neither `text` nor `tokens`), or a stop string came,
    which `text` leaves out; length: `max_tokens` or the context was reached; timeout: its
    `timeout_seconds` were; cancelled: nobody waits for it any more.

    Attributes:
        sequence: which of `num_return_sequences` this is of, from 0.
        log_probabilities: the model's own, of each token, where they were asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    sequence: int = 0
    log_probabilities: list[float] = field(default_factory=list)


def score_name(model_name: str) -> str:
    """The Triton model that scores by `model_name`."""
    return f"{model_name}-score"


def model_settings(args: Mapping[str, str]) -> dict[str, Any]:
    """What `parameters` of config.pbtxt hold, JSON each, of what Triton gives to `initialize`."""
    given = json.loads(args["model_config"])["parameters"]
    return {name: json.loads(value["string_value"]) for name, value in given.items()}


def decode(value: bytes, name: str) -> str:
    """The text of an input; raises UserError where it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        what = f"{name} is not UTF-8: byte {value[error.start]:#04x} at offset {error.start}"
        raise UserError(what, "send UTF-8 text") from None
