"""Sets of a text's token n-grams: 64-bit keys of n-grams, and a Bloom filter of keys."""

from itertools import count
from math import comb, exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

BLOCK, BLOCK_KEYS = 1 << 17, 1 << 14
"""Number of tokens hashed, and keys inserted, at a time, so that intermediate results fit the L2
cache."""
BITS_PER_KEY = 20
MIN_FILTER_WORDS = 1 << 7
PROBES = 4
"""Bits that a key sets, all in one 64-bit word, so that a key costs one cache miss (a blocked Bloom
filter: Putze, Sanders and Singler, 2007)."""

_FACTOR = 0x9E3779B97F4A7C15
_MIXED = np.arange(1 << 16, dtype=np.uint64) * np.uint64(_FACTOR)
_MASKS = np.bitwise_or.reduce(
    [np.uint64(1) << (_MIXED >> np.uint64(64 - 6 * (i + 1)) & np.uint64(63)) for i in range(PROBES)]
)
"""(65536,) the bits that a key sets, selected by 16 of its bits."""

_BIT_COUNTS = np.array([byte.bit_count() for byte in range(256)], np.uint8)
"""Set bits of each byte; `np.bitwise_count` needs NumPy 2, which Paddle's environment lacks."""


def ngram_length(vocab_size: int) -> int:
    """Tokens of an n-gram, a power of two: about 32 bytes of English.

    They are 8 of a usual vocabulary: PaLM (2022) and Llama 3 (2024) call an example contaminated
    by the share of its 8-grams that the training text contains.
    """
    return 8 if vocab_size >= 2048 else 16 if vocab_size >= 512 else 32


def ngram_keys(tokens: NDArray[Any], ngram: int, stride: int = 1) -> Keys:
    """Keys of the n-grams that begin at the tokens 0, stride, 2 stride, ...

    A key is a polynomial of the n-gram's 64-bit words, each of two ids of 32 bits, whose high bits
    are then mixed into the low ones.

    Args:
        tokens: (n,) ids.
        ngram: even.

    Returns:
        ((n - ngram) // stride + 1,) keys.
    """
    keys = np.empty(max(0, (len(tokens) - ngram) // stride + 1), np.uint64)
    size = max(1, BLOCK // stride)
    for at in range(0, len(keys), size):
        hashes = keys[at : at + size]
        begin, end = at * stride, (at + len(hashes) - 1) * stride + ngram
        ids = np.ascontiguousarray(tokens[begin:end], "<u4")
        words = np.ndarray((ngram // 2, len(hashes)), "<u8", ids, strides=(8, 4 * stride))
        hashes[:] = words[0]
        for i in range(1, ngram // 2):
            hashes += words[i] * np.uint64(pow(_FACTOR, i, 1 << 64))
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(_FACTOR)
    return keys


class BloomFilter:
    """A set of keys without false negatives, but with false positives.

    Attributes:
        words: (w,) of 64 bits, w a power of two; also all that it takes in memory.
    """

    def __init__(self, words: Keys) -> None:
        self.words = words
        self._shift = np.uint64(65 - len(words).bit_length())

    @staticmethod
    def of_size(keys: int, max_bytes: int) -> "BloomFilter":
        """An empty filter with `BITS_PER_KEY` or more, as far as `max_bytes` allow it."""
        words = MIN_FILTER_WORDS
        while 64 * words < BITS_PER_KEY * keys and 16 * words <= max_bytes:
            words *= 2
        return BloomFilter(np.zeros(words, np.uint64))

    @property
    def rate(self) -> float:
        """False positive rate."""
        set_bits = _BIT_COUNTS[self.words.view(np.uint8)].reshape(-1, 8).sum(axis=1)
        return float(((set_bits / 64) ** PROBES).mean())

    def add(self, keys: Keys) -> None:
        """Add (k,) keys; many at once are faster, since they are put into the filter in order."""
        keys = np.sort(keys)
        for begin in range(0, len(keys), BLOCK_KEYS):
            places, masks = self._places(keys[begin : begin + BLOCK_KEYS])
            np.bitwise_or.at(self.words, places, masks)

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """(k,) whether each key was added, or is a false positive."""
        places, masks = self._places(keys)
        is_member: NDArray[np.bool_] = (self.words[places] & masks) == masks
        return is_member

    def _places(self, keys: Keys) -> tuple[NDArray[np.int64], Keys]:
        """(k,) word of each key and its bits in it."""
        masks = _MASKS.take((keys >> np.uint64(16)).astype(np.uint16))
        return (keys >> self._shift).view(np.int64), masks


def expected_rate(bits_per_key: float) -> float:
    """The expected `rate` of a filter with so many bits for each of its keys, whose number in a
    word has a Poisson distribution."""
    zero = (1 - 1 / 64) ** PROBES  # probability that a key leaves a bit of its word 0
    terms = (comb(PROBES, j) * exp(64 / bits_per_key * (zero**j - 1)) for j in range(PROBES + 1))
    return sum(-term if j % 2 else term for j, term in enumerate(terms))


def smallest_stride(tokens: int, bits: int, least: int, rate: float) -> int:
    """The smallest stride, at least `least`, with which one of so many consecutive n-grams of
    another text is found by chance at most with probability `rate`."""
    strides = count(least)
    return next(n for n in strides if n * expected_rate(bits * n / max(tokens, 1)) <= rate)
