"""Indexes of a data set's training part, with which `lathe evaluate` finds contaminated examples:
one of a text's n-grams, in a Bloom filter, and one of the prompts of conversations.

The index of n-grams contains every `stride`-th one of the training text; of an evaluated text,
every n-gram is looked up. One of any `stride` consecutive shared n-grams begins at a multiple of
`stride` in the training text, so a shared run of `ngram + stride - 1` tokens is always found, and
the index is `stride` times smaller than one of all n-grams.
"""

import hashlib
from itertools import count
from math import comb, exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.artifacts.metadata import NgramIndex
from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.progress import bar

NGRAMS_FILE, PROMPTS_FILE = "ngrams.bloom", "prompts.keys"
STRIDE = 6
"""With 8-grams, every shared run of 13 tokens, GPT-3's n-gram, is found."""
MAX_FALSE_POSITIVE_RATE = 0.05
"""Maximum false positive rate per window of `stride` n-grams; texts for which the filter is too
small get a larger stride."""
SPAN = 1 << 24
MAX_SHARED = 10
"""A prompt of more training conversations is an instruction that all examples of a task share, as
GPT-3's authors (2020) found for n-grams of more than ten documents."""
HINT = "run prepare again"

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
        # `words` is a view with overlapping rows: row i has the i-th pair of ids of every n-gram.
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
            word_indexes, masks = self._words_and_masks(keys[begin : begin + BLOCK_KEYS])
            np.bitwise_or.at(self.words, word_indexes, masks)

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """(k,) whether each key was added, or is a false positive."""
        word_indexes, masks = self._words_and_masks(keys)
        is_member: NDArray[np.bool_] = (self.words[word_indexes] & masks) == masks
        return is_member

    def _words_and_masks(self, keys: Keys) -> tuple[NDArray[np.int64], Keys]:
        """(k,) word of each key and its bits in it."""
        masks = _MASKS.take((keys >> np.uint64(16)).astype(np.uint16))
        return (keys >> self._shift).view(np.int64), masks


def expected_rate(bits_per_key: float) -> float:
    """The expected `rate` of a filter with so many bits for each of its keys, whose number in a
    word has a Poisson distribution."""
    zero = (1 - 1 / 64) ** PROBES  # probability that a key leaves a bit of its word 0
    terms = (comb(PROBES, j) * exp(64 / bits_per_key * (zero**j - 1)) for j in range(PROBES + 1))
    return sum(-term if j % 2 else term for j, term in enumerate(terms))


class TrainingIndex:
    """Every `stride`-th n-gram of a text, in a Bloom filter.

    Attributes:
        ngram: tokens of an n-gram.
    """

    def __init__(self, filter: BloomFilter, ngram: int, stride: int) -> None:
        self.filter, self.ngram, self.stride = filter, ngram, stride

    @staticmethod
    def build(tokens: NDArray[Any], ngram: int, max_bytes: int) -> "TrainingIndex":
        """The index of a text, (n,) ids, whose filter has at most `max_bytes`."""
        filter = BloomFilter.of_size(len(tokens) // STRIDE, max_bytes)
        bits = 64 * len(filter.words)
        # The smallest stride with which one of so many consecutive n-grams of another text is found
        # by chance at most with that probability.
        stride = next(
            n
            for n in count(STRIDE)
            if n * expected_rate(bits * n / max(len(tokens), 1)) <= MAX_FALSE_POSITIVE_RATE
        )
        span = SPAN // stride * stride
        with bar("index", len(tokens)) as progress:
            # Spans overlap by what an n-gram that begins in one reaches into the next.
            for begin in range(0, len(tokens), span):
                text = tokens[begin : begin + span + ngram - stride]
                filter.add(ngram_keys(text, ngram, stride))
                progress.advance(len(tokens[begin : begin + span]))
        return TrainingIndex(filter, ngram, stride)

    @staticmethod
    def read(folder: Path, metadata: NgramIndex) -> "TrainingIndex":
        """The index of a data set.

        Raises:
            UserError: it is missing, or not a filter's size.
        """
        path = folder / NGRAMS_FILE
        try:
            words = np.fromfile(path, "<u8")
            size = path.stat().st_size
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}", HINT, explain_os_error(error).code
            ) from None
        if not size or size & (size - 1) or size % 8:
            raise UserError(f"{path}: {size:,} bytes, not a Bloom filter", HINT, Code.CORRUPT)
        return TrainingIndex(BloomFilter(words), metadata.ngram, metadata.stride)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write it into a data set's folder; returns what its metadata says of it."""
        self.filter.words.astype("<u8", copy=False).tofile(folder / NGRAMS_FILE)
        return {
            "ngram": self.ngram,
            "stride": self.stride,
            "finds_tokens": self.shortest,
            "false_positive_rate": self.rate,
        }

    @property
    def shortest(self) -> int:
        """Length of the shortest overlap that is certain to be found, one window, in tokens."""
        return self.ngram + self.stride - 1

    @property
    def rate(self) -> float:
        """False positive rate per window."""
        return 1 - (1 - self.filter.rate) ** self.stride

    def windows(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """(w,) whether any n-gram of each window, `stride` consecutive n-grams of a text (n,), is
        in the index; the n-grams behind the last whole window do not count."""
        keys = ngram_keys(tokens, self.ngram)
        windows = keys[: len(keys) // self.stride * self.stride].reshape(-1, self.stride)
        is_contained: NDArray[np.bool_] = np.any(self.filter.contains(windows), axis=1)
        return is_contained


class PromptIndex:
    """The prompts of some conversations; a prompt is all that precedes an answer of the assistant.

    N-grams say nothing here: conversations of one template and one format share most of them. A
    question is known if a training conversation begins with the same tokens up to the assistant's
    turn: the same system prompt, tools and earlier turns.

    Attributes:
        keys: (k,) 64-bit digests of prompts, sorted.
    """

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self.keys = keys

    @staticmethod
    def build(
        tokens: NDArray[Any], mask: NDArray[Any], sizes: NDArray[np.integer[Any]]
    ) -> "PromptIndex":
        """The index of conversations.

        Args:
            tokens: (n,) ids of all of them.
            mask: (n,) nonzero where the assistant writes.
            sizes: (conversations,) their tokens.
        """
        keys: list[int] = []
        end = 0
        with bar("index", len(sizes)) as progress:
            for size in sizes.tolist():
                begin, end = end, end + size
                is_answer = mask[begin:end] != 0
                answers = np.flatnonzero(is_answer & ~np.append(False, is_answer[:-1]))
                keys += [_key(tokens[begin : begin + answer]) for answer in answers.tolist()]
                progress.advance(1)
        unique, counts = np.unique(np.array(keys, np.uint64), return_counts=True)
        return PromptIndex(unique[counts <= MAX_SHARED])

    @staticmethod
    def read(folder: Path) -> "PromptIndex":
        """The index of a data set.

        Raises:
            UserError: it is missing.
        """
        path = folder / PROMPTS_FILE
        try:
            return PromptIndex(np.fromfile(path, "<u8"))
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}", HINT, explain_os_error(error).code
            ) from None

    def write(self, folder: Path) -> int:
        """Write it into a data set's folder; returns the number of prompts."""
        self.keys.astype("<u8", copy=False).tofile(folder / PROMPTS_FILE)
        return len(self.keys)

    def __contains__(self, prompt: NDArray[Any]) -> bool:
        """Whether a prompt, (tokens,) ids, is in the index."""
        key = np.uint64(_key(prompt))
        at = int(np.searchsorted(self.keys, key))
        return at < len(self.keys) and bool(self.keys[at] == key)


def _key(tokens: NDArray[Any]) -> int:
    ids = np.ascontiguousarray(tokens, "<u4")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
