"""Prefix cache: keys and values of prompts, so that shared prefixes are read only once.

A prefix is divided into blocks of BLOCK tokens. A block's key consists of all tokens up to its end,
which are compared and not only hashed, so that only identical prefixes match. It is stored as soon
as it has been read, so that the next turn of a conversation finds it. Generated tokens are not
stored: a step of one token may round differently than one of many, and an answer must not depend on
what is cached. The least recently used blocks are evicted.

Source: automatic prefix caching, vLLM (Kwon et al., SOSP 2023).
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from lathe_serving.runtime.kv_cache import KeyValues, KVCache

BLOCK = 16


class PrefixCache:
    """At most `max_bytes` of keys and values; 0 stores nothing.

    Not thread-safe: only the batcher's thread uses it.
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
