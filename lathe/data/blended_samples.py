"""Draw samples from several data sets by weight, in exactly Megatron's order.

Source: Megatron-LM, `megatron/data/blendable_dataset.py` and `helpers.cpp`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lathe.data.samples import Samples
from lathe.data.tokens import TokenSequences


class Share(NamedTuple):
    """Documents to draw samples from, and how often in proportion to others."""

    weight: float
    dataset: TokenSequences
    documents: range


def draw(
    shares: Sequence[Share], seq_len: int, num_samples: int, seed: int
) -> "Samples | BlendedSamples":
    """`num_samples` or more of the shares; of a single one they are simply its samples."""
    if len(shares) == 1:
        return Samples(shares[0].dataset, shares[0].documents, seq_len, num_samples, seed)
    return BlendedSamples(shares, seq_len, num_samples, seed)


class BlendedSamples:
    """Samples of several data sets, sample by sample from the one furthest behind its weight.

    Each part is asked for half a percent more samples than its weight says, as Megatron does.

    Attributes:
        part_idx, sample_idx: see `blending_indices`.
        per_epoch: samples of one pass over all parts.
    """

    def __init__(self, shares: Sequence[Share], seq_len: int, num_samples: int, seed: int) -> None:
        # Added one by one, and normalised again below, as in Megatron: both may touch a last bit.
        total = np.cumsum([share.weight for share in shares])[-1]
        weights = [float(share.weight / total) for share in shares]
        self.parts = [
            Samples(dataset, documents, seq_len, math.ceil(num_samples * weight * 1.005), seed)
            for weight, (_, dataset, documents) in zip(weights, shares, strict=True)
        ]
        self.per_epoch = sum(part.per_epoch for part in self.parts)
        self.part_idx, self.sample_idx = blending_indices(np.array(weights), num_samples)

    def __len__(self) -> int:
        return len(self.part_idx)

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        """Sample i, (seq_len + 1,) int64."""
        return self.parts[int(self.part_idx[i])][int(self.sample_idx[i])]

    def origin(self, i: int) -> str:
        """The folder of the part, and the documents in it, that sample i has tokens of."""
        part = self.parts[int(self.part_idx[i])]
        return f"{part.dataset.folder.name} {part.origin(int(self.sample_idx[i]))}"


def blending_indices(
    weights: np.ndarray[Any, Any], n: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(n,) uint8 part and (n,) uint32 (int64 from 2^32 on) sample of that part, for each sample.

    Sample i is of the part with the largest `weight * max(i, 1) - taken`, the first of equals.
    That loop is run in about sqrt(n) pieces side by side, from counts of samples taken that are
    guessed for all pieces but the first; where a piece does not end with the counts that the next
    one began with, the next is run again from these. So the result is the loop's to the bit, and
    because the choice soon forgets a wrong start a few rounds do.
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
