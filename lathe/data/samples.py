"""Cut a token data set into training samples, and draw samples from several data sets by weight,
exactly as Megatron does.

Source: Megatron-LM, `megatron/data/dataset_utils.py` (split), `gpt_dataset.py` (samples),
`blendable_dataset.py` and `helpers.cpp` (blends).
Training requests samples by number, in order. Their positions are computed once, from the lengths
of the documents alone; they take some 12 bytes per sample, and 4 per document and epoch.
"""

import logging
import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lathe.data.chat_samples import ChatSamples
from lathe.data.megatron import TokenArrays
from lathe.data.tokens import TokenSequences
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

PARTS = ("training", "validation", "test")

# Documents, and samples, that are placed at once: it bounds the 64-bit intermediates to some 30 MB.
BLOCK = 1 << 20


def split_boundaries(split: Sequence[float], n: int) -> list[int]:
    """[0, a, b, c] with documents [0, a) for training, [a, b) validation, [b, c) test; c = n.

    Each boundary is the previous one plus `round(fraction * n)`; the excess of the last one over
    `n` is subtracted from every boundary but the first, down to 0 (Megatron allows negative ones).
    Warns with the counts if a requested part is empty.
    """
    boundaries = compute_boundaries(split, n)
    counts = np.diff(boundaries)
    if any(share > 0 and count == 0 for share, count in zip(split, counts, strict=True)):
        shares = ",".join(f"{share:g}" for share in split)
        sizes = ", ".join(f"{count} {part}" for part, count in zip(PARTS, counts, strict=True))
        _warn_once(f"split {shares} of {n} documents leaves a part empty: {sizes}")
    return boundaries


@cache
def _warn_once(message: str) -> None:
    """Warn, but not again for every part that is opened, nor in every worker."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(message)


def compute_boundaries(split: Sequence[float], n: int) -> list[int]:
    """The boundaries of `split_boundaries`, without a warning."""
    boundaries = [0]
    for share in split:
        boundaries.append(boundaries[-1] + round(share / sum(split) * n))
    overshoot = boundaries[-1] - n  # of rounding, or negative
    return [0, *(max(0, boundary - overshoot) for boundary in boundaries[1:])]


def require_sample(part: str, documents: int, tokens: int, seq_len: int) -> None:
    """Raise UserError, with the counts, unless `tokens` suffice for one sample of `seq_len` + 1."""
    if tokens <= seq_len:
        raise UserError(
            f"{part}: {documents:,} documents with {tokens:,} tokens, fewer than one sample of "
            f"max_seq_len {seq_len:,} + 1",
            "use a larger corpus, a smaller Data.Train.dataset.max_seq_len, "
            "or another Data.Train.dataset.split",
            Code.TOO_LITTLE_DATA,
        )


def split_sequences(split: Sequence[float], arrays: TokenArrays) -> list[int]:
    """`split_boundaries`, with sequences in place of documents: no document is in two parts.

    Megatron's BERT data sets count documents too; its GPT data sets count sequences, which may
    divide a document if it has several, as with `--split-sentences`.
    """
    bounds = arrays.document_bounds
    boundaries: list[int] = bounds[split_boundaries(split, len(bounds) - 1)].tolist()
    return boundaries


class SampleIndex:
    """Positions of the shuffled samples of `seq_len` + 1 tokens in a range of sequences.

    As in Megatron's `GPTDataset`, every sequence counts as a document. The documents of as many
    epochs as `num_samples` needs are shuffled, concatenated, and cut every `seq_len` tokens;
    neighbours share one token. A last epoch of which less than 80 % is needed is shuffled
    separately, so that it does not displace samples of the full ones.

    Args:
        sizes: (N,) int32, tokens of every document of the data set.
        documents: range of documents to use; together they must fill at least one sample.

    Attributes:
        per_epoch: samples of one pass over the documents.
        doc_idx: (epochs * documents,) int32, order of the documents.
        sample_idx: (samples + 1, 2), position in `doc_idx` and token offset of each start; int32,
            or int64 where a position does not fit.
        shuffle_idx: (samples,) uint32, or int64, order of the samples.
    """

    def __init__(
        self,
        sizes: np.ndarray[Any, Any],
        documents: range,
        seq_len: int,
        num_samples: int,
        seed: int,
    ) -> None:
        # How many epochs hold `num_samples`, and whether the last one is shuffled apart: if less
        # than 80 % of it is needed, beside the samples of the `whole` ones.
        tokens = int(sizes[documents.start : documents.stop].sum(dtype=np.int64))
        assert tokens > seq_len
        self.sizes, self.seq_len = sizes, seq_len
        self.per_epoch = (tokens - 1) // seq_len
        self.epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
        whole = ((self.epochs - 1) * tokens - 1) // seq_len if self.epochs > 1 else 0
        apart = self.epochs > 1 and num_samples - whole < int(0.80 * self.per_epoch)
        total = (self.epochs * tokens - 1) // seq_len

        # Megatron's generator, and its order of calls: documents first, then samples.
        rng = np.random.RandomState(seed)
        self.doc_idx = np.empty(self.epochs * len(documents), np.int32)
        epochs = self.doc_idx.reshape(self.epochs, -1)
        epochs[:] = np.arange(documents.start, documents.stop, dtype=np.int32)
        _shuffle(rng, self.doc_idx, len(self.doc_idx) - apart * len(documents))
        self.sample_idx = _sample_idx(sizes, self.doc_idx, seq_len, total)
        self.shuffle_idx = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
        _shuffle(rng, self.shuffle_idx, whole if apart else total)

    def __len__(self) -> int:
        """Number of samples in all epochs, at least `num_samples`."""
        return len(self.shuffle_idx)

    def spans(self, i: int) -> list[tuple[int, int, int]]:
        """(document, begin, end) of each run of tokens that makes up sample i."""
        at = int(self.shuffle_idx[i])
        (first, begin), (last, end) = self.sample_idx[at].tolist(), self.sample_idx[at + 1].tolist()
        return [
            (
                document,
                begin if position == first else 0,
                end + 1 if position == last else int(self.sizes[document]),
            )
            for position, document in enumerate(self.doc_idx[first : last + 1].tolist(), first)
        ]


class Samples(SampleIndex):
    """The samples of a data set: an index, and the tokens that it points to.

    Raises:
        UserError: the documents are shorter than one sample. (Megatron would repeat them in it.)
    """

    def __init__(
        self, dataset: TokenSequences, documents: range, seq_len: int, num_samples: int, seed: int
    ) -> None:
        sizes = dataset.sizes[documents.start : documents.stop]
        tokens = int(sizes.sum(dtype=np.int64))
        require_sample(f"{dataset.folder}, documents {documents}", len(sizes), tokens, seq_len)
        super().__init__(dataset.sizes, documents, seq_len, num_samples, seed)
        self.dataset = dataset

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        """Sample i, (seq_len + 1,) int64."""
        pieces = [self.dataset.span(*span) for span in self.spans(i)]
        return np.concatenate(pieces).astype(np.int64)

    def mask(self, i: int) -> np.ndarray[Any, Any]:
        """(seq_len + 1,) whether the loss of predicting each token of sample i counts: all do."""
        return np.ones(self.seq_len + 1, bool)

    def counted_tokens(self, i: int) -> int:
        """Number of tokens of sample i whose loss counts."""
        return self.seq_len

    def counts(self, n: int) -> list[tuple["Samples", int]]:
        """Itself, and how many of the first `n` samples are its own."""
        return [(self, n)]

    def positions(self, i: int) -> np.ndarray[Any, Any]:
        """(seq_len,) place of each token of sample i but the last, counted from the beginning of
        its sequence or of the sample, whichever is later."""
        runs = [np.arange(end - begin) for _, begin, end in self.spans(i)]
        return np.concatenate(runs)[:-1]

    def origin(self, i: int) -> str:
        """The documents that sample i contains tokens of, by their number in the data set."""
        sequences = (sequence for sequence, begin, end in self.spans(i) if end > begin)
        return ", ".join(
            str(self.dataset.arrays.containing_document(sequence)) for sequence in sequences
        )


def _shuffle(rng: np.random.RandomState, values: np.ndarray[Any, Any], count: int) -> None:
    """Shuffle the first `count` values and the remaining ones separately, in place."""
    rng.shuffle(values[:count])
    rng.shuffle(values[count:])


def _sample_idx(
    sizes: np.ndarray[Any, Any], doc_idx: np.ndarray[Any, Any], seq_len: int, total: int
) -> np.ndarray[Any, Any]:
    """Document and offset of the flat tokens 0, seq_len, 2 * seq_len, ... in shuffled order."""
    fits = len(doc_idx) <= np.iinfo(np.int32).max
    index = np.empty((total + 1, 2), np.int32 if fits else np.int64)
    placed = length = 0  # samples with a start, and tokens, before the block of documents
    for first in range(0, len(doc_idx), BLOCK):
        block = sizes[doc_idx[first : first + BLOCK]]
        ends = np.cumsum(block, dtype=np.int64) + length
        length = int(ends[-1])
        # The samples that start in this block: token i * seq_len is in one of its documents.
        starting = min(-(-length // seq_len), total + 1)
        for at in range(placed, starting, BLOCK):
            flat = np.arange(at, min(at + BLOCK, starting), dtype=np.int64) * seq_len
            positions = np.searchsorted(ends, flat, side="right")
            rows = index[at : at + len(flat)]
            rows[:, 0] = positions + first
            rows[:, 1] = flat - (ends[positions] - block[positions])
        placed = starting
    index[0] = 0  # empty documents in front belong to the first sample
    return index


class Share(NamedTuple):
    """Documents to sample from, and their weight relative to others.

    Attributes:
        packed: samples of these documents if they are conversations and packed already.
    """

    weight: float
    dataset: TokenSequences
    documents: range
    packed: ChatSamples | None = None


def draw(
    shares: Sequence[Share], seq_len: int, num_samples: int, seed: int, packs: bool = False
) -> "Samples | ChatSamples | BlendedSamples":
    """At least `num_samples` samples of the shares; a single share is sampled directly.

    Args:
        packs: whether several conversations may share a sample.
    """
    if len(shares) == 1:
        return _part(shares[0], seq_len, num_samples, seed, packs)
    return BlendedSamples(shares, seq_len, num_samples, seed, packs)


def _part(
    share: Share, seq_len: int, num_samples: int, seed: int, packs: bool
) -> Samples | ChatSamples:
    if share.packed:
        return share.packed.reordered(num_samples, seed)
    if share.dataset.has_mask:
        return ChatSamples(share.dataset, share.documents, seq_len, num_samples, seed, packs)
    return Samples(share.dataset, share.documents, seq_len, num_samples, seed)


class BlendedSamples:
    """Samples of several data sets, each from the one that is furthest behind its weight.

    Half a percent more samples than its weight requires are prepared of each part, as in Megatron.

    Attributes:
        part_idx, sample_idx: see `blending_indices`.
        per_epoch: samples of one pass over all parts.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        seq_len: int,
        num_samples: int,
        seed: int,
        packs: bool = False,
    ) -> None:
        # Summed one by one and normalised again below, as in Megatron: both may change the last
        # bit.
        total = np.cumsum([share.weight for share in shares])[-1]
        weights = [float(share.weight / total) for share in shares]
        self.parts = [
            _part(share, seq_len, math.ceil(num_samples * weight * 1.005), seed, packs)
            for weight, share in zip(weights, shares, strict=True)
        ]
        self.per_epoch = sum(part.per_epoch for part in self.parts)
        self.part_idx, self.sample_idx = blending_indices(np.array(weights), num_samples)
        self._counted = 0, np.zeros(len(shares), np.int64)

    def counts(self, n: int) -> list[tuple[Samples | ChatSamples, int]]:
        """Each part, and how many of the first `n` samples are its own."""
        at, counts = self._counted
        if n < at:
            at, counts = 0, np.zeros_like(counts)
        counts = counts + np.bincount(self.part_idx[at:n], minlength=len(counts))
        self._counted = n, counts
        return list(zip(self.parts, counts.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.part_idx)

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        """Sample i, (seq_len + 1,) int64."""
        return self.parts[int(self.part_idx[i])][int(self.sample_idx[i])]

    def positions(self, i: int) -> np.ndarray[Any, Any]:
        """See `Samples.positions`."""
        return self.parts[int(self.part_idx[i])].positions(int(self.sample_idx[i]))

    def mask(self, i: int) -> np.ndarray[Any, Any]:
        """See `Samples.mask`."""
        return self.parts[int(self.part_idx[i])].mask(int(self.sample_idx[i]))

    def counted_tokens(self, i: int) -> int:
        """See `Samples.counted_tokens`."""
        return self.parts[int(self.part_idx[i])].counted_tokens(int(self.sample_idx[i]))

    def origin(self, i: int) -> str:
        """The part's folder, and its documents that sample i contains tokens of."""
        part = self.parts[int(self.part_idx[i])]
        return f"{part.dataset.folder.name} {part.origin(int(self.sample_idx[i]))}"


def blending_indices(
    weights: np.ndarray[Any, Any], n: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(n,) uint8 part and (n,) uint32 (int64 from 2^32 on) sample of that part, for each sample.

    Sample i is of the part with the largest `weight * max(i, 1) - taken`, the first of equals.
    The loop is vectorized over about sqrt(n) segments that run side by side, starting from guessed
    counts of samples taken (exact for the first). A segment whose predecessor ends with other
    counts than it started from is run again with those, until all agree. The result is therefore
    bit-identical to the sequential loop; a few rounds suffice, since a wrong start has no lasting
    effect on the choices.
    """
    weights = (weights / weights.sum())[:, None]  # (parts, 1)
    length = math.isqrt(n)
    first = np.arange(0.0, n, length)  # (pieces,)
    begin = np.floor(weights * first)  # (parts, pieces) samples taken
    begin[0] += first - begin.sum(0)
    end = np.empty_like(begin)
    part_idx = np.empty((len(first), length), np.uint8)
    wrong = np.arange(len(first))
    while len(wrong):
        # One step of all wrong segments at a time, each with its own counts.
        taken, all_wrong = begin[:, wrong], np.arange(len(wrong))
        for step in range(length):
            behind = weights * np.maximum(first[wrong] + step, 1) - taken
            chosen = behind.argmax(0)
            part_idx[wrong, step] = chosen
            taken[chosen, all_wrong] += 1
        end[:, wrong] = taken
        # Those whose predecessor has ended otherwise start again from there.
        wrong = 1 + np.flatnonzero((end[:, :-1] != begin[:, 1:]).any(0))
        begin[:, wrong] = end[:, wrong - 1]
    flat = part_idx.reshape(-1)[:n]
    sample_idx = np.empty(n, np.uint32 if n < 2**32 else np.int64)
    for part in range(len(weights)):
        is_part = flat == part
        sample_idx[is_part] = np.arange(np.count_nonzero(is_part), dtype=sample_idx.dtype)
    return flat, sample_idx
