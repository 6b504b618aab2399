"""Keys and values of a batch of texts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

KeyValues = NDArray[Any]
"""Keys and values of n tokens of a row in all layers, (2 * sum of n_kv_head_i, n, head_dim)."""


@dataclass
class KVCache(ABC):
    """Keys and values of a batch, at most `capacity` tokens per row; runtimes differ in the layout.

    Attributes:
        buffers: keys of every layer, then values; the first axis is the row. Row b has `lengths[b]`
            tokens; anything after them is never read.
        lengths: int64 (batch,).
        n_prefix: tokens of the model's prefix at the start of every row, not counted in lengths,
            capacity and positions.
    """

    buffers: list[NDArray[Any]]
    lengths: NDArray[np.int64]
    capacity: int
    n_prefix: int = field(default=0, kw_only=True)

    def permute(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Copy the tokens of `sources[i]` to `rows[i]`, as if simultaneously."""
        moves = [(row, source) for row, source in zip(rows, sources, strict=True) if row != source]
        if not moves:
            return
        to, of = (list(part) for part in zip(*moves, strict=True))
        longest = self.n_prefix + int(self.lengths[of].max())
        # Indexing by lists copies all sources before it writes: rows may be swapped.
        for buffer in self.buffers:
            self._copy(buffer, to, of, longest)
        self.lengths[to] = self.lengths[of]

    def read(self, first: int, n: int) -> KeyValues:
        """A copy of n tokens of row 0."""
        first += self.n_prefix
        return np.concatenate([self._get(buffer, first, n) for buffer in self.buffers])

    def write(self, first: int, tokens: KeyValues) -> None:
        """Write the result of `read` at position `first` of row 0."""
        ends = np.cumsum([0, *map(self._n_head, self.buffers)])
        for buffer, (begin, end) in zip(self.buffers, pairwise(ends), strict=True):
            self._set(buffer, self.n_prefix + first, tokens[begin:end])

    def put_prefix(self, prefix: KeyValues) -> None:
        """Write the `n_prefix` tokens before all others to every row of an empty cache."""
        self.write(-self.n_prefix, prefix)
        others = range(1, len(self.lengths))
        self.permute(others, [0] * len(others))

    @abstractmethod
    def _copy(self, buffer: NDArray[Any], to: list[int], of: list[int], n: int) -> None:
        """Copy at least the first n tokens of rows `of` to rows `to`."""

    @abstractmethod
    def _n_head(self, buffer: NDArray[Any]) -> int:
        """The layer's number of key-value heads."""

    @abstractmethod
    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        """(n_head, n, head_dim) of row 0."""

    @abstractmethod
    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        """Write (n_head, n, head_dim) to row 0."""


@dataclass
class ContiguousCache(KVCache):
    """onnxruntime's layout: buffers (batch, n_kv_head_i, capacity, head_dim), float32 or float16 as
    the graph computes.

    Attributes:
        single_stream: for `SingleStreamModel`, with one row: the same memory, bound to its second
            graph.
    """

    binding: Any = field(repr=False)
    single_stream: "ContiguousCache | None" = field(default=None, repr=False)

    def _copy(self, buffer: NDArray[Any], to: list[int], of: list[int], n: int) -> None:
        buffer[to, :, :n] = buffer[of, :, :n]

    def _n_head(self, buffer: NDArray[Any]) -> int:
        return int(buffer.shape[1])

    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        return buffer[0, :, first : first + n]

    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        buffer[0, :, first : first + tokens.shape[1]] = tokens


@dataclass
class PagedCache(KVCache):
    """OpenVINO's layout: buffers (batch, blocks, n_kv_head_i, BLOCK, head_dim), float32, or
    bfloat16 as uint16.

    Attributes:
        tensors: OpenVINO's views of the full buffers, of which this cache may be a part.
        first_row: index of its first row.
    """

    tensors: list[Any] = field(repr=False)
    first_row: int = 0

    BLOCK = 32  # tokens; the only size that OpenVINO's attention for CPUs takes

    def blocks(self, row: int, n: int) -> NDArray[np.int32]:
        """Numbers, within the tensors, of the blocks that hold the first n tokens of a row."""
        blocks_per_row = self.buffers[0].shape[1]
        first = (self.first_row + row) * blocks_per_row
        return np.arange(first, first - (-n // self.BLOCK), dtype=np.int32)

    def _copy(self, buffer: NDArray[Any], to: list[int], of: list[int], n: int) -> None:
        n_blocks = -(-n // self.BLOCK)
        buffer[to, :n_blocks] = buffer[of, :n_blocks]

    def _n_head(self, buffer: NDArray[Any]) -> int:
        return int(buffer.shape[2])

    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        block, offset = np.divmod(np.arange(first, first + n), self.BLOCK)
        tokens: KeyValues = buffer[0, block, :, offset].swapaxes(0, 1)
        return tokens

    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        block, offset = np.divmod(np.arange(first, first + tokens.shape[1]), self.BLOCK)
        buffer[0, block, :, offset] = tokens.swapaxes(0, 1)


@dataclass(frozen=True)
class MixedCaches:
    """The caches of a mixed step: that of the decoding rows, and the prompt's, with one row."""

    rows: KVCache
    prompt: KVCache
    binding: Any = None
