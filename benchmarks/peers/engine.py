"""Interface of the league's engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
DECODED_PROMPT, STEPS = 128, 16  # prompt tokens and steps when decoding


class Engine(ABC):
    """A loaded model; `version` is the engine's version."""

    version: str

    @staticmethod
    @abstractmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        """Convert a checkpoint folder to the engine's own files.

        Args:
            calibration: tokens (N, T) for formats that need activation ranges.
            weights: name of the format.
            output: an empty folder, later passed to `__init__`.
        """

    @abstractmethod
    def __init__(self, folder: Path, threads: int) -> None: ...

    @abstractmethod
    def prefill(self, prompt: Ids) -> None:
        """Process a prompt (T,) up to its first new token, with an empty cache."""

    @abstractmethod
    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        """Continue prompts (B, T) greedily and together; returns the new tokens (B, steps + 1).

        Calls `tick` after prefilling all prompts, and after each of `steps` steps of one token per
        row."""

    @abstractmethod
    def log_likelihoods(self, tokens: Ids) -> NDArray[np.floating[Any]]:
        """Log-likelihoods (T - 1,) of tokens[1:] in nats."""


def log_likelihoods(logits: NDArray[np.float32], tokens: Ids) -> NDArray[np.float64]:
    """Log-likelihoods of tokens[1:], given logits (T, V) or (T - 1, V) after each token."""
    rows = logits[: len(tokens) - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(rows)), tokens[1:]]
    result: NDArray[np.float64] = chosen - np.log(np.exp(rows).sum(axis=1))
    return result
