"""Finds training documents that are near copies of held-out ones, which a model would memorize.

One document is a near copy of another if at least half of the n-grams of either are in the other
too. So a document that quotes a whole held-out one is found, and so is one that it quotes. All
n-grams of the held-out documents are looked up, but only every `STRIDE`-th n-gram of the training
text, which is enough to estimate the share.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.data.samples import compute_boundaries
from lathe.data.training_index import STRIDE, BloomFilter, Keys, ngram_keys
from lathe_base.progress import bar

SHARED = 0.5
"""Share of a document's n-grams from which it counts as a near copy."""
MAX_DOCUMENTS_PER_NGRAM = 16
"""Number of documents remembered per n-gram, the last ones: common phrases are in very many."""
MAX_NGRAM_KEYS = 1 << 24
SPAN_TOKENS = 1 << 20

Documents = NDArray[np.int64]


def near_duplicates(
    tokens: NDArray[Any], sizes: NDArray[np.integer[Any]], split: Sequence[float], ngram: int
) -> Documents:
    """Returns the documents to drop, so that no training document is a near copy of a held-out one.

    The split applies to the remaining documents. Since it shrinks the held-out part too, its first
    documents become training documents; near copies of held-out ones are dropped among those as
    well.

    Args:
        tokens: (sum of sizes,) the ids of all documents in their order.
        sizes: (documents,) tokens of each.
        split: see `lathe.data.samples.split_boundaries`.
        ngram: tokens of an n-gram.
    """
    count = len(sizes)
    first = compute_boundaries(split, count)[1]
    if first in (0, count):
        return np.zeros(0, np.int64)
    bounds = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    text = _Text(tokens, bounds, ngram)
    held_out = _HeldOut(text, first)
    later = np.full(count, -1)
    with bar("compare with held-out documents", count) as progress:
        # Whole documents of about SPAN_TOKENS together, whose n-grams fit in memory.
        steps = np.searchsorted(bounds, np.arange(0, bounds[-1], SPAN_TOKENS))
        for begin, end in pairwise(np.unique([*steps, count]).tolist()):
            later[begin:end] = held_out.latest_copies(text, begin, end)
            progress.advance(end - begin)
    return _left_out(later, split)


def copies(
    tokens: NDArray[Any], sizes: NDArray[np.integer[Any]], split: Sequence[float]
) -> Documents:
    """Like `near_duplicates`, but only training documents that are equal to a held-out one."""
    ends = np.cumsum(sizes, dtype=np.int64)
    last: dict[bytes, int] = {}
    digests = []
    for i, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        digests.append(hashlib.sha256(tokens[begin:end].tobytes()).digest())
        last[digests[-1]] = i
    return _left_out(np.array([last[digest] for digest in digests], np.int64), split)


def _left_out(later: Documents, split: Sequence[float]) -> Documents:
    """The documents to drop.

    Args:
        later: (documents,) the last copy of each document behind it, or any number before that.
    """
    left_out = np.zeros(len(later), bool)
    # Until none is wrong: what is dropped moves the boundary, so that some held-out documents
    # become training documents, which may have copies among those that stay held out.
    while True:
        kept = np.flatnonzero(~left_out)
        boundary = compute_boundaries(split, len(kept))[1]
        training, start = kept[:boundary], kept[boundary] if boundary < len(kept) else len(later)
        wrong = training[later[training] >= start]
        if not len(wrong):
            return np.flatnonzero(left_out)
        left_out[wrong] = True


@dataclass(frozen=True)
class _Text:
    """The documents, of which the i-th is `tokens[bounds[i] : bounds[i + 1]]`."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    ngram: int

    def ngrams(self, begin: int, end: int, stride: int) -> tuple[Documents, Keys]:
        """(k,) document of every `stride`-th n-gram within documents [begin, end), from 0 in this
        range, and (k,) keys."""
        bounds = self.bounds[begin : end + 1] - self.bounds[begin]
        tokens = self.tokens[self.bounds[begin] : self.bounds[end]]
        keys = ngram_keys(tokens, self.ngram, stride)
        firsts = np.minimum(-(-bounds // stride), len(keys))  # in `keys`, of each document
        documents = np.repeat(np.arange(end - begin), np.diff(firsts))
        is_within = np.arange(len(keys)) * stride + self.ngram <= bounds[1:][documents]
        return documents[is_within], keys[is_within]


def _each_once(documents: Documents, values: NDArray[Any]) -> tuple[Documents, NDArray[np.uint32]]:
    """Sorted, unique pairs of a document and a 32-bit value."""
    codes = np.sort(documents.astype(np.uint64) << np.uint64(32) | values.astype(np.uint64))
    codes = codes[np.diff(codes, prepend=~codes[:1]) != 0]  # np.unique hashes: four times as slow
    return (codes >> np.uint64(32)).astype(np.int64), codes.astype(np.uint32)


class _HeldOut:
    """The n-grams of the held-out documents, and which documents they are in."""

    def __init__(self, text: _Text, first: int) -> None:
        last = len(text.bounds) - 1
        documents, keys = text.ngrams(first, last, stride=1)
        self.first, self.count = first, last - first
        self.mask = np.uint64(0)  # of so many n-grams, a part is enough
        while np.count_nonzero(keys & self.mask == 0) > MAX_NGRAM_KEYS:
            self.mask = self.mask << np.uint64(1) | np.uint64(1)
        documents, keys = self._sampled(documents, keys)
        # A filter of all keys, because most n-grams of the training text are in none of them; and
        # 32 bits of each with its documents, sorted by n-gram: those of the i-th n-gram are
        # owners[begins[i] : ends[i]], at most `MAX_DOCUMENTS_PER_NGRAM`.
        self.filter = BloomFilter.of_size(len(keys), MAX_NGRAM_KEYS * 8)
        self.filter.add(keys)
        documents, short = _each_once(documents, keys >> np.uint64(32))
        self.totals = np.bincount(documents, minlength=self.count)
        order = np.lexsort((documents, short))
        self.owners = documents[order]
        self.keys, self.begins = np.unique(short[order], return_index=True)
        self.ends = np.append(self.begins[1:], len(short))
        self.begins = np.maximum(self.begins, self.ends - MAX_DOCUMENTS_PER_NGRAM)

    def _sampled(self, documents: Documents, keys: Keys) -> tuple[Documents, Keys]:
        if not self.mask:
            return documents, keys
        sampled = keys & self.mask == 0
        return documents[sampled], keys[sampled]

    def latest_copies(self, text: _Text, begin: int, end: int) -> Documents:
        """(end - begin,) the last held-out document after each document of [begin, end) of which
        it is a near copy, or -1."""
        latest = np.full(end - begin, -1)
        documents, keys = self._sampled(*text.ngrams(begin, end, STRIDE))
        totals = np.bincount(documents, minlength=end - begin)
        # Which held-out n-grams each document has, and then all pairs of a document and an owner of
        # such an n-gram, with the number of n-grams that they share.
        maybe = self.filter.contains(keys)
        documents, short = _each_once(documents[maybe], keys[maybe] >> np.uint64(32))
        at = np.minimum(np.searchsorted(self.keys, short), max(len(self.keys) - 1, 0))
        known = self.keys[at] == short if len(self.keys) else np.zeros(len(short), bool)
        documents, at = documents[known], at[known]
        counts = self.ends[at] - self.begins[at]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = self.owners[np.repeat(self.begins[at], counts) + offsets]
        documents = np.repeat(documents, counts)
        pairs, shared = np.unique(documents * self.count + owners, return_counts=True)
        documents, owners = pairs // self.count, pairs % self.count
        # Of the shorter of the two, by n-grams: only every `STRIDE`-th one of `text` was looked up.
        fewer = np.minimum(totals[documents], self.totals[owners] / STRIDE)
        copies = (shared >= SHARED * fewer) & (owners + self.first > documents + begin)
        np.maximum.at(latest, documents[copies], owners[copies] + self.first)
        return latest
