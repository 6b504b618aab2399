"""Cut a token data set into training samples, exactly as Megatron does.

Source: Megatron-LM, `megatron/data/dataset_utils.py` (split) and `gpt_dataset.py` (samples).
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.data.tokens import TokenDataset
from lathe.errors import UserError

log = logging.getLogger("lathe")

PARTS = ("training", "validation", "test")


def split_boundaries(split: Sequence[float], n: int) -> list[int]:
    """[0, a, b, c] with documents [0, a) for training, [a, b) validation, [b, c) test; c = n.

    Each boundary is the previous one plus `round(fraction * n)`, and what the last overshoots `n`
    by is taken off every boundary but the first. Where that would push a boundary below 0 (which
    Megatron lets happen) it is 0. Warns with the counts when a part that was asked for is empty.
    """
    boundaries = [0]
    for share in split:
        boundaries.append(boundaries[-1] + round(share / sum(split) * n))
    overshoot = boundaries[-1] - n
    boundaries = [0, *(max(0, boundary - overshoot) for boundary in boundaries[1:])]
    counts = np.diff(boundaries)
    if any(share > 0 and count == 0 for share, count in zip(split, counts, strict=True)):
        log.warning(
            "split %s of %d documents leaves a part empty: %s",
            ",".join(f"{share:g}" for share in split),
            n,
            ", ".join(f"{count} {part}" for part, count in zip(PARTS, counts, strict=True)),
        )
    return boundaries


def require_sample(part: str, documents: int, tokens: int, seq_len: int) -> None:
    """Raise UserError, with the counts, unless `tokens` make one sample of `seq_len` + 1."""
    if tokens <= seq_len:
        raise UserError(
            f"{part}: {documents:,} documents with {tokens:,} tokens, fewer than one sample of "
            f"max_seq_len {seq_len:,} + 1",
            "take a larger corpus, a smaller Data.Train.dataset.max_seq_len, "
            "or another Data.Train.dataset.split",
        )


class Samples:
    """Shuffled samples of `seq_len` + 1 tokens from a range of documents.

    The documents of as many epochs as `num_samples` needs are shuffled and laid end to end, and
    cut every `seq_len` tokens; neighbours share one token. A last epoch of which less than 80 % is
    needed is shuffled apart, so that it cannot displace samples of the whole ones.

    Attributes:
        doc_idx: (epochs * documents,) int32, order of the documents.
        sample_idx: (samples + 1, 2) int32, position in `doc_idx` and token offset of each start.
        shuffle_idx: (samples,) uint32, order of the samples.

    Raises:
        UserError: the documents do not hold one sample. (Megatron would repeat them within one.)
    """

    def __init__(
        self, dataset: TokenDataset, documents: range, seq_len: int, num_samples: int, seed: int
    ) -> None:
        sizes = dataset.sizes[documents.start : documents.stop]
        tokens = int(sizes.sum(dtype=np.int64))
        require_sample(f"{dataset.folder}, documents {documents}", len(sizes), tokens, seq_len)
        self.dataset, self.seq_len = dataset, seq_len
        self.epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
        whole = ((self.epochs - 1) * tokens - 1) // seq_len if self.epochs > 1 else 0
        apart = self.epochs > 1 and num_samples - whole < int(0.80 * ((tokens - 1) // seq_len))
        total = (self.epochs * tokens - 1) // seq_len

        rng = np.random.RandomState(seed)
        groups = [self.epochs - 1, 1] if apart else [self.epochs]
        order = np.arange(documents.start, documents.stop, dtype=np.int32)
        self.doc_idx = np.concatenate([_shuffled(rng, np.tile(order, n)) for n in groups])
        self.sample_idx = _sample_idx(dataset.sizes[self.doc_idx], seq_len, total)
        index = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
        parts = (index[:whole], index[whole:]) if apart else (index,)
        self.shuffle_idx = np.concatenate([_shuffled(rng, part) for part in parts])

    def __len__(self) -> int:
        """Samples in all epochs: `num_samples` or more."""
        return len(self.shuffle_idx)

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        """Sample i, (seq_len + 1,) int64."""
        at = int(self.shuffle_idx[i])
        (first, begin), (last, end) = self.sample_idx[at].tolist(), self.sample_idx[at + 1].tolist()
        pieces = [
            self.dataset.span(
                document,
                begin if position == first else 0,
                end + 1 if position == last else int(self.dataset.sizes[document]),
            )
            for position, document in enumerate(self.doc_idx[first : last + 1].tolist(), first)
        ]
        return np.concatenate(pieces).astype(np.int64)


def _shuffled(rng: np.random.RandomState, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rng.shuffle(values)
    return values


def _sample_idx(sizes: np.ndarray[Any, Any], seq_len: int, total: int) -> np.ndarray[Any, Any]:
    """Where the flat tokens 0, seq_len, 2 * seq_len, ... lie among documents of these sizes."""
    ends = np.cumsum(sizes, dtype=np.int64)
    flat = np.arange(total + 1, dtype=np.int64) * seq_len
    positions = np.searchsorted(ends, flat, side="right")
    positions[0] = 0  # empty documents in front belong to the first sample
    offsets = flat - (ends[positions] - sizes[positions])
    return np.stack([positions, offsets], axis=1).astype(np.int32)
