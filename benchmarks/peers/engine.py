"""What every engine of the league does."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
DECODED_PROMPT, STEPS = 128, 16  # tokens of a prompt that is continued, and steps


class Engine(ABC):
    """A model in memory, ready to compute. `version` is that of the engine."""

    version: str

    @staticmethod
    @abstractmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        """Write a checkpoint folder as this engine's own files.

        Args:
            calibration: (N, T) tokens for formats that need the ranges of activations.
            weights: name of the format.
            output: an empty folder; what `__init__` is given.
        """

    @abstractmethod
    def __init__(self, folder: Path, threads: int) -> None: ...

    @abstractmethod
    def prefill(self, prompt: Ids) -> None:
        """Read a prompt (T,) up to its first new token, with nothing remembered from before."""

    @abstractmethod
    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        """Continue prompts (B, T) greedily and together; returns the new tokens (B, steps + 1).

        Calls `tick` when all prompts have been read, and after each of `steps` steps of one token a
        row."""

    @abstractmethod
    def log_likelihoods(self, tokens: Ids) -> NDArray[np.floating[Any]]:
        """Those of tokens[1:], (T - 1,) in nats."""


def log_likelihoods(logits: NDArray[np.float32], tokens: Ids) -> NDArray[np.float64]:
    """Those of tokens[1:], given logits (T, V) or (T - 1, V) after each token."""
    rows = logits[: len(tokens) - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(rows)), tokens[1:]]
    result: NDArray[np.float64] = chosen - np.log(np.exp(rows).sum(axis=1))
    return result
