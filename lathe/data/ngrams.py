"""Which n-grams of tokens a training text contains: a sample of them in a Bloom filter.

Winnowing (Schleimer, Wilkerson and Aiken, 2003) keeps the n-gram of the smallest hash of every
`window` consecutive ones. It depends on the tokens of the window alone, so two texts that share a
run of `ngram + window - 1` tokens keep at least one n-gram in common, wherever the run is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.errors import UserError

Keys = NDArray[np.uint32]

WINDOW = 6
"""The smallest window: with 8-grams, every shared run of 13 tokens, GPT-3's n-gram, is found."""
BLOCK = 1 << 15
"""Tokens whose hashes, 4 bytes each, stay in a core's L2 cache."""
MOST_SLOTS_PER_KEY, SLOTS_PER_KEY = 64, 16
SMALLEST_SLOTS = 1 << 13
FLUSH_KEYS = 1 << 24
RANGE = 1 << 20

_FACTOR = 0x9E3779B1
_ORDER, _SLOT = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
"""Murmur3's multipliers: one decides which n-grams are kept, the other where they are put; the
hashes that are kept are small, and would all be put at the beginning."""
_NONE = np.uint32(0xFFFFFFFF)


def ngram_of(vocab_size: int) -> int:
    """Tokens of an n-gram, a power of two: about 32 bytes of English.

    They are 8 of a usual vocabulary: PaLM (2022) and Llama 3 (2024) call an example contaminated
    by the share of its 8-grams that the training text contains.
    """
    return 8 if vocab_size >= 2048 else 16 if vocab_size >= 512 else 32


def winnow(
    tokens: NDArray[Any],
    ngram: int,
    window: int = WINDOW,
    ends: NDArray[np.int64] | None = None,
) -> Iterator[tuple[NDArray[np.int64], Keys]]:
    """Yield the n-grams that winnowing keeps, a block of the text at a time.

    Args:
        tokens: (n,) ids.
        ends: increasing ends of the documents in `tokens`, so that no n-gram of two of them is
            kept, and what is kept of one does not depend on its neighbours; the window has to be
            shorter than an n-gram then.

    Yields:
        (k,) places, increasing, where the kept n-gram of a window differs from that of the window
        before: of the last n-gram of the window, which is in the same document as the kept one;
        and (k,) keys of these n-grams.
    """
    overlap = ngram + window - 2
    last: Keys = np.zeros(0, np.uint32)
    for begin in range(0, len(tokens) - overlap, BLOCK):
        hashes = _hashes(tokens[begin : begin + BLOCK + overlap], ngram)
        if ends is not None:
            assert window < ngram
            inner = ends[slice(*np.searchsorted(ends, (begin + 1, begin + len(hashes) + ngram)))]
            across = (inner[:, None] - np.arange(1, ngram) - begin).reshape(-1)
            hashes[across[(across >= 0) & (across < len(hashes))]] = _NONE
        smallest = _sliding_minimum(hashes, window)
        changed = np.flatnonzero(smallest[1:] != smallest[:-1]) + 1
        if not len(last) or smallest[0] != last[0]:
            changed = np.concatenate(([0], changed))
        last = smallest[-1:]
        kept = smallest[changed]
        if ends is not None:
            changed, kept = changed[kept != _NONE], kept[kept != _NONE]
        yield changed + (begin + window - 1), kept * _SLOT


def _hashes(tokens: NDArray[Any], ngram: int) -> Keys:
    """(n - ngram + 1,) polynomial hashes of the n-grams, of twice as many tokens at each step."""
    hashes = tokens.astype(np.uint32)
    step = 1
    while step < ngram:
        factor = np.uint32(pow(_FACTOR, step, 1 << 32))
        hashes, right = hashes[:-step] * factor, hashes[step:]
        hashes += right
        step *= 2
    hashes *= _ORDER
    return hashes


def _sliding_minimum(values: Keys, window: int) -> Keys:
    """(n - window + 1,) smallest of each `window` consecutive values."""
    width = 1
    while 2 * width <= window:
        values, width = np.minimum(values[:-width], values[width:]), 2 * width
    rest = window - width
    return np.minimum(values[:-rest], values[rest:]) if rest else values


class NgramFilter:
    """A Bloom filter of n-grams with one hash function.

    Its bits are also what it takes in memory, beside `FLUSH_KEYS` keys that wait to be put in
    order: in order, they touch every part of the filter once, which is twice as fast.

    Attributes:
        bits: (slots / 8,) bytes.
        ngram, window: see `winnow`.
    """

    def __init__(self, bits: NDArray[np.uint8], ngram: int, window: int) -> None:
        self.bits, self.ngram, self.window = bits, ngram, window
        self._shift = np.uint32(32 - (8 * len(bits)).bit_length() + 1)
        self._waiting: list[Keys] = []
        self._count = 0
        self._last_tokens: NDArray[Any] = np.zeros(0, np.uint16)

    @staticmethod
    def of_size(tokens: int, most_bytes: int, ngram: int) -> "NgramFilter":
        """An empty filter for so many tokens.

        One slot in 64 is taken, in `most_bytes` one in 16; a larger text has a larger window.
        """
        slots = SMALLEST_SLOTS
        while (
            slots < MOST_SLOTS_PER_KEY * _expected(tokens, WINDOW) and slots * 2 <= 8 * most_bytes
        ):
            slots *= 2
        slots = min(slots, 1 << 32)
        window = WINDOW
        while slots < SLOTS_PER_KEY * _expected(tokens, window):
            window += 1
        return NgramFilter(np.zeros(slots // 8, np.uint8), ngram, window)

    @staticmethod
    def read(path: Path, ngram: int, window: int) -> "NgramFilter":
        """The filter in a file.

        Raises:
            UserError: it cannot be read, or is not a filter's size.
        """
        try:
            bits = np.fromfile(path, np.uint8)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", "run prepare again") from None
        if len(bits) < SMALLEST_SLOTS // 8 or len(bits) & (len(bits) - 1) or len(bits) > 1 << 29:
            raise UserError(f"{path}: {len(bits):,} bytes, not a filter", "run prepare again")
        return NgramFilter(bits, ngram, window)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest text of which at least one n-gram is kept."""
        return self.ngram + self.window - 1

    @property
    def rate(self) -> float:
        """Share of n-grams that are not in the text and are found all the same."""
        self._flush()
        return float(np.bitwise_count(self.bits).sum(dtype=np.int64)) / (8 * len(self.bits))

    def add(self, keys: Keys) -> None:
        """Add n-grams of this window."""
        self._waiting.append(keys)
        self._count += len(keys)
        if self._count >= FLUSH_KEYS:
            self._flush()

    def extend(self, tokens: NDArray[Any]) -> None:
        """Add the n-grams of a further part of the text, (n,) ids."""
        tokens = np.concatenate((self._last_tokens, tokens))
        for _, keys in winnow(tokens, self.ngram, self.window):
            self.add(keys)
        self._last_tokens = tokens[max(0, len(tokens) - self.shortest + 1) :]

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """(k,) whether each n-gram is in the text, or shares its slot with one that is."""
        self._flush()
        slots = keys >> self._shift
        found: NDArray[np.uint8] = self.bits[slots >> 3] >> (slots & 7).astype(np.uint8) & 1
        return found.astype(bool)

    def write(self, path: Path) -> None:
        """Write the bits."""
        self._flush()
        self.bits.tofile(path)

    def _flush(self) -> None:
        if not self._waiting:
            return
        slots = np.sort(np.concatenate(self._waiting) >> self._shift)
        self._waiting, self._count = [], 0
        size = min(RANGE, 8 * len(self.bits))
        edges = np.arange(0, 8 * len(self.bits) + 1, size)
        bounds = np.searchsorted(slots, edges)
        taken = np.zeros(size, bool)
        for first, begin, end in zip(edges, bounds, bounds[1:], strict=False):
            if begin < end:
                taken[:] = False
                taken[slots[begin:end] - np.uint32(first)] = True
                part = self.bits[first // 8 : (first + size) // 8]
                part |= np.packbits(taken, bitorder="little")


def _expected(tokens: int, window: int) -> int:
    """N-grams of a text that winnowing keeps: two in `window + 1`."""
    return 2 * tokens // (window + 1)
