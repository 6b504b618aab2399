"""Which training documents are near copies of held-out ones: they would be known by heart.

Documents are compared by the n-grams that winnowing keeps of each (`lathe.data.ngrams`): one is a
near copy of another if at least half of the n-grams of either are in the other too. So a document
that quotes a held-out one whole is found, and one that is quoted by it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.data.ngrams import Keys, NgramFilter, winnow
from lathe.data.samples import boundaries_of

SHARED = 0.5
"""Of a document's n-grams, from which on it is a near copy."""
MOST_OWNERS = 16
"""Documents that are remembered for an n-gram, the last ones: phrases are in very many."""
MOST_KEYS = 1 << 24
SPAN_TOKENS = 1 << 20

Documents = NDArray[np.int64]


def near_copies(
    tokens: NDArray[Any], sizes: NDArray[np.integer[Any]], split: Sequence[float], ngram: int
) -> Documents:
    """The documents to leave out, so that none of the training part is a near copy of a held-out
    one.

    The split is that of the documents that are left. It makes the held-out part smaller too, so
    that its first documents become training documents: of those, near copies are left out as well.

    Args:
        tokens: (sum of sizes,) the ids of all documents in their order.
        sizes: (documents,) tokens of each.
        split: see `lathe.data.samples.split_boundaries`.
        ngram: tokens of an n-gram.
    """
    count = len(sizes)
    first = boundaries_of(split, count)[1]
    if first in (0, count):
        return np.zeros(0, np.int64)
    bounds = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    text = _Text(tokens, bounds, ngram)
    held_out = _HeldOut(text, first)
    later = np.full(count, -1)
    for begin, end in _spans(bounds):
        later[begin:end] = held_out.latest_copies(text, begin, end)
    left_out = later >= 0
    left_out[first:] = False
    while True:
        kept = np.flatnonzero(~left_out)
        boundary = boundaries_of(split, len(kept))[1]
        training, start = kept[:boundary], kept[boundary] if boundary < len(kept) else count
        wrong = training[later[training] >= start]
        if not len(wrong):
            return np.flatnonzero(left_out)
        left_out[wrong] = True


def _spans(bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of whole documents that have some tokens together."""
    steps = np.arange(0, bounds[-1], SPAN_TOKENS)
    yield from pairwise(np.unique([*np.searchsorted(bounds, steps), len(bounds) - 1]).tolist())


@dataclass(frozen=True)
class _Text:
    """The documents, of which the i-th is `tokens[bounds[i] : bounds[i + 1]]`."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    ngram: int

    def kept(self, begin: int, end: int) -> tuple[Documents, Keys]:
        """(k,) document of each n-gram that is kept of documents [begin, end), from 0 in this
        range, and (k,) keys."""
        first, last = self.bounds[begin], self.bounds[end]
        ends = self.bounds[begin + 1 : end + 1] - first
        blocks = list(winnow(self.tokens[first:last], self.ngram, ends=ends))
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        places, keys = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        counts = np.diff(np.searchsorted(places, ends), prepend=0)
        return np.repeat(np.arange(end - begin), counts), keys


def _each_once(documents: Documents, values: NDArray[Any]) -> tuple[Documents, NDArray[np.uint32]]:
    """Pairs of a document and a 32-bit value, sorted, each once."""
    codes = np.sort(documents.astype(np.uint64) << np.uint64(32) | values.astype(np.uint64))
    codes = codes[np.diff(codes, prepend=~codes[:1]) != 0]  # np.unique hashes: four times as slow
    return (codes >> np.uint64(32)).astype(np.int64), codes.astype(np.uint32)


class _HeldOut:
    """The n-grams of the held-out documents, and which documents they are in."""

    def __init__(self, text: _Text, first: int) -> None:
        last = len(text.bounds) - 1
        documents, keys = _each_once(*text.kept(first, last))
        self.first, self.count = first, last - first
        self.mask = np.uint32(0)  # of so many n-grams, a part is enough
        while np.count_nonzero(keys & self.mask == 0) > MOST_KEYS:
            self.mask = self.mask << np.uint32(1) | np.uint32(1)
        sampled = keys & self.mask == 0
        documents, keys = documents[sampled], keys[sampled]
        self.totals = np.bincount(documents, minlength=self.count)
        order = np.lexsort((documents, keys))
        self.owners = documents[order]
        self.keys, self.begins = np.unique(keys[order], return_index=True)
        self.ends = np.append(self.begins[1:], len(keys))
        self.begins = np.maximum(self.begins, self.ends - MOST_OWNERS)
        self.filter = NgramFilter.of_size(4 * len(keys), 1 << 28, text.ngram)
        self.filter.add(self.keys)

    def latest_copies(self, text: _Text, begin: int, end: int) -> Documents:
        """(end - begin,) the last held-out document after each document of [begin, end) of which
        it is a near copy, or -1."""
        found = np.full(end - begin, -1)
        documents, keys = text.kept(begin, end)
        sampled = keys & self.mask == 0
        documents, keys = documents[sampled], keys[sampled]
        totals = np.bincount(documents, minlength=end - begin)
        maybe = self.filter.contains(keys)
        documents, keys = documents[maybe], keys[maybe]
        at = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        known = self.keys[at] == keys if len(self.keys) else np.zeros(len(keys), bool)
        documents, at = _each_once(documents[known], at[known])
        counts = self.ends[at] - self.begins[at]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = self.owners[np.repeat(self.begins[at], counts) + offsets]
        documents = np.repeat(documents, counts)
        pairs, shared = np.unique(documents * self.count + owners, return_counts=True)
        documents, owners = pairs // self.count, pairs % self.count
        least = np.minimum(totals[documents], self.totals[owners])
        copies = (shared >= SHARED * least) & (owners + self.first > documents + begin)
        np.maximum.at(found, documents[copies], owners[copies] + self.first)
        return found
