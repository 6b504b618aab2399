"""Draw samples from several data sets by weight, in exactly Megatron's order.

Source: Megatron-LM, `megatron/data/blendable_dataset.py` and `helpers.cpp`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lathe.data.chat_samples import ChatSamples
from lathe.data.samples import Samples
from lathe.data.tokens import TokenSequences


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
        taken, all_wrong = begin[:, wrong], np.arange(len(wrong))
        for step in range(length):
            behind = weights * np.maximum(first[wrong] + step, 1) - taken
            chosen = behind.argmax(0)
            part_idx[wrong, step] = chosen
            taken[chosen, all_wrong] += 1
        end[:, wrong] = taken
        wrong = 1 + np.flatnonzero((end[:, :-1] != begin[:, 1:]).any(0))
        begin[:, wrong] = end[:, wrong - 1]
    flat = part_idx.reshape(-1)[:n]
    sample_idx = np.empty(n, np.uint32 if n < 2**32 else np.int64)
    for part in range(len(weights)):
        of_part = flat == part
        sample_idx[of_part] = np.arange(np.count_nonzero(of_part), dtype=sample_idx.dtype)
    return flat, sample_idx
