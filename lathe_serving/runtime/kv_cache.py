"""Keys and values of a batch of texts, and of the beginnings of prompts that others have sent.

Each runtime has a layout of its own: `session.ContiguousCache`, `openvino_model.PagedCache`.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # tokens of a prompt that are stored together

KeyValues = NDArray[Any]
"""Keys and values of n tokens of a row in all layers, (2 * sum of n_kv_head_i, n, head_dim)."""


@dataclass
class KVCache(ABC):
    """Keys and values of a batch, at most `capacity` tokens per row; runtimes differ in the layout.

    Attributes:
        buffers: keys of every layer, then values; the first axis is the row, the last three are
            n_kv_head_i, tokens and head_dim. Row b has `lengths[b]` tokens; anything after them is
            never read.
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
        ends = np.cumsum([0, *(buffer.shape[-3] for buffer in self.buffers)])
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
    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        """(n_head, n, head_dim) of row 0."""

    @abstractmethod
    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        """Write (n_head, n, head_dim) to row 0."""


@dataclass(frozen=True)
class MixedCaches:
    """The caches of a mixed step: that of the decoding rows, and the prompt's, with one row."""

    rows: KVCache
    prompt: KVCache
    binding: Any = None


class PrefixCache:
    """Keys and values of prompts, so that shared prefixes are read only once: at most `max_bytes`
    of them; 0 stores nothing.

    A prefix is divided into blocks of BLOCK tokens. A block's key consists of all tokens up to its
    end, which are compared and not only hashed, so that only identical prefixes match. It is stored
    as soon as it has been read, so that the next turn of a conversation finds it. Generated tokens
    are not stored: a step of one token may round differently than one of many, and an answer must
    not depend on what is cached. The least recently used blocks are evicted.

    Not thread-safe: only the batcher's thread uses it.

    Source: automatic prefix caching, vLLM (Kwon et al., SOSP 2023).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, KeyValues] = OrderedDict()
        self.n_bytes = 0

    def stored(self, prompt: NDArray[np.int64]) -> int:
        """The number of tokens that `load` would copy."""
        return len(self._matching_blocks(prompt)) * BLOCK

    def load(self, prompt: NDArray[np.int64], cache: KVCache) -> int:
        """Copy the longest stored prefix of a prompt into a cache of one row, except at least its
        last two tokens: the logits of the last one choose the first new one, and a step of a single
        token may round differently than one of several.

        Returns:
            The number of tokens, which is the row's new length.
        """
        blocks = self._matching_blocks(prompt)
        for number, key in enumerate(blocks):
            cache.write(number * BLOCK, self._blocks[key])
        self._touch(blocks)
        cache.lengths[0] = len(blocks) * BLOCK
        return len(blocks) * BLOCK

    def store(self, prompt: NDArray[np.int64], cache: KVCache) -> None:
        """Store a prompt, or the part of it that was read, from a cache of one row; only its
        beginning if it is larger than `max_bytes`."""
        if not self._max_bytes:
            return
        keys = [*_keys(prompt)]
        for number, key in enumerate(keys):
            if key not in self._blocks:
                block = cache.read(number * BLOCK, BLOCK)
                if (number + 1) * block.nbytes > self._max_bytes:
                    del keys[number:]
                    break
                self._blocks[key] = block
                self.n_bytes += block.nbytes
        self._touch(keys)
        while self.n_bytes > self._max_bytes:
            _, block = self._blocks.popitem(last=False)
            self.n_bytes -= block.nbytes

    def _matching_blocks(self, prompt: NDArray[np.int64]) -> list[bytes]:
        return [*takewhile(self._blocks.__contains__, _keys(prompt[:-2]))]

    def _touch(self, keys: list[bytes]) -> None:
        """Mark blocks as used, the first ones last, because a block is useless without those before
        it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _keys(prompt: NDArray[np.int64]) -> Iterator[bytes]:
    tokens = prompt.astype(np.int32)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        yield tokens[:end].tobytes()
