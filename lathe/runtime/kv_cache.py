"""Keys and values of a batch of texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.floating[Any]]
"""Keys and values of n tokens of a row in all layers, (2 * sum of n_kv_head_i, n, head_dim)."""


@dataclass
class KVCache:
    """Keys and values of a batch, at most `capacity` tokens per row.

    Attributes:
        keys, values: per layer (batch, n_kv_head_i, capacity, head_dim), float32 or float16 as the
            graph computes; row b holds `lengths[b]` tokens, what lies after them is never read.
        lengths: int64 (batch,).
    """

    keys: list[NDArray[np.floating[Any]]]
    values: list[NDArray[np.floating[Any]]]
    lengths: NDArray[np.int64]
    capacity: int
    binding: Any = field(repr=False)

    def permute(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Copy to `rows[i]` the tokens of `sources[i]`, all at once."""
        moves = [(row, source) for row, source in zip(rows, sources, strict=True) if row != source]
        if not moves:
            return
        to, of = (list(part) for part in zip(*moves, strict=True))
        longest = int(self.lengths[of].max())
        for buffer in (*self.keys, *self.values):
            buffer[to, :, :longest] = buffer[of, :, :longest]
        self.lengths[to] = self.lengths[of]

    def read(self, first: int, n: int) -> Tokens:
        """A copy of n tokens of row 0."""
        return np.concatenate(
            [buffer[0, :, first : first + n] for buffer in (*self.keys, *self.values)]
        )

    def write(self, first: int, tokens: Tokens) -> None:
        """Put what `read` has returned at position `first` of row 0."""
        buffers = (*self.keys, *self.values)
        ends = np.cumsum([0, *(buffer.shape[1] for buffer in buffers)])
        for buffer, (begin, end) in zip(buffers, pairwise(ends), strict=True):
            buffer[0, :, first : first + tokens.shape[1]] = tokens[begin:end]
