"""N-gram index of a data set's training part, with which `lathe evaluate` finds contaminated
examples.

The index contains every `stride`-th n-gram of the training text; of an evaluated text, every n-gram
is looked up. One of any `stride` consecutive shared n-grams begins at a multiple of `stride` in the
training text, so a shared run of `ngram + stride - 1` tokens is always found, and the index is
`stride` times smaller than one of all n-grams.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.data.ngrams import BloomFilter, ngram_keys, ngram_length, smallest_stride
from lathe_base.artifacts.metadata import NgramIndex
from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.progress import bar

FILE = "ngrams.bloom"
STRIDE = 6
"""With 8-grams, every shared run of 13 tokens, GPT-3's n-gram, is found."""
MAX_FALSE_POSITIVE_RATE = 0.05
"""Maximum false positive rate per window of `stride` n-grams; texts for which the filter is too
small get a larger stride."""
SPAN = 1 << 24
HINT = "run prepare again"


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
        stride = smallest_stride(len(tokens), bits, STRIDE, MAX_FALSE_POSITIVE_RATE)
        span = SPAN // stride * stride
        with bar("index", len(tokens)) as progress:
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
        path = folder / FILE
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
        self.filter.words.astype("<u8", copy=False).tofile(folder / FILE)
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


def training_index(
    tokens: NDArray[Any], vocab_size: int, max_megabytes: int
) -> TrainingIndex | None:
    """The index of a training text, (n,) ids, or None if none is wanted."""
    if not max_megabytes:
        return None
    return TrainingIndex.build(tokens, ngram_length(vocab_size), max_megabytes << 20)
