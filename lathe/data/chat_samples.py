"""Samples of conversations: whole examples, packed into rows of equal length.

A row of `seq_len` + 1 tokens holds one example after the other, and end-of-text tokens behind them,
which do not count. An example never spans two rows, so that with attention within documents
(`Data.reset_attention`) it is computed exactly as if it were alone.
"""

import bisect
import copy
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.data.tokens import TokenSequences
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")


class ChatSamples:
    """The shuffled rows of some examples of a data set; every epoch has an order of its own.

    An example of more than `seq_len` + 1 tokens ends with the last answer that fits; one whose
    first answer does not is left out.

    Args:
        documents: range of examples to use.
        packs: whether a row may have several examples.

    Attributes:
        per_epoch: rows.
        cut, dropped: number of examples that are shortened, and left out.

    Raises:
        UserError: no example fits.
    """

    def __init__(
        self,
        dataset: TokenSequences,
        documents: range,
        seq_len: int,
        num_samples: int,
        seed: int,
        packs: bool,
    ) -> None:
        self.dataset, self.seq_len = dataset, seq_len
        room = seq_len + 1
        self.sizes, counted = _usable(dataset, documents, room)
        self.first = documents.start
        self.dropped = int(np.count_nonzero(counted == 0))
        whole = dataset.sizes[documents.start : documents.stop]
        self.cut = int(np.count_nonzero((counted > 0) & (self.sizes < whole)))
        # Rows are made of the examples that fit, which keep their numbers in the data set.
        kept = np.flatnonzero(counted)
        if not len(kept):
            raise UserError(
                f"{dataset.folder}, examples {documents}: none has an answer of the assistant "
                f"within {room} tokens",
                "set a larger Data.Train.dataset.max_seq_len, or another split",
                Code.TOO_LITTLE_DATA,
            )
        rows = pack(self.sizes[kept], room) if packs else [[i] for i in range(len(kept))]
        self.rows = [[int(kept[i]) for i in row] for row in rows]
        self.counted = np.array([counted[row].sum() for row in self.rows])
        self.per_epoch = len(self.rows)
        self.order = self._order(num_samples, seed)

    def reordered(self, num_samples: int, seed: int) -> "ChatSamples":
        """The same rows in the order for another number of samples, without packing them again."""
        other = copy.copy(self)
        other.order = self._order(num_samples, seed)
        return other

    def _order(self, num_samples: int, seed: int) -> NDArray[np.int64]:
        rng = np.random.RandomState(seed)  # the generator of `SampleIndex`
        epochs = max(1, -(-num_samples // self.per_epoch))
        return np.concatenate([rng.permutation(self.per_epoch) for _ in range(epochs)])

    def __len__(self) -> int:
        """Number of rows in all epochs, at least `num_samples`."""
        return len(self.order)

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        """Row i, (seq_len + 1,)."""
        tokens = np.full(self.seq_len + 1, self.dataset.eos_id, np.int64)
        for example, begin, end in self._places(i):
            tokens[begin:end] = self.dataset.span(self.first + example, 0, end - begin)
        return tokens

    def mask(self, i: int) -> NDArray[np.bool_]:
        """(seq_len + 1,) whether the loss of predicting each token of row i counts: those of the
        assistant, but for the first token of an example, which follows from nothing."""
        mask = np.zeros(self.seq_len + 1, bool)
        for example, begin, end in self._places(i):
            mask[begin + 1 : end] = self.dataset.mask(self.first + example)[1 : end - begin] != 0
        return mask

    def counted_tokens(self, i: int) -> int:
        """Number of tokens of row i whose loss counts."""
        return int(self.counted[self.order[i]])

    def positions(self, i: int) -> NDArray[np.int64]:
        """(seq_len,) place of each token of row i but the last in its example; the tokens behind
        the examples are one more."""
        ends = [end for _, _, end in self._places(i)]
        lengths = np.diff([0, *ends, self.seq_len + 1])
        return np.concatenate([np.arange(length) for length in lengths])[:-1]

    def counts(self, n: int) -> list[tuple["ChatSamples", int]]:
        """Itself, and how many of the first `n` samples are its own."""
        return [(self, n)]

    def origin(self, i: int) -> str:
        """The examples in row i, by their number in the data set."""
        return ", ".join(str(self.first + example) for example, _, _ in self._places(i))

    def _places(self, i: int) -> list[tuple[int, int, int]]:
        """(example, begin, end) of each example in row i."""
        examples = self.rows[self.order[i]]
        ends = np.cumsum(self.sizes[examples]).tolist()
        return list(zip(examples, [0, *ends[:-1]], ends, strict=True))


def _usable(
    dataset: TokenSequences, documents: range, room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) tokens of each example to use, and (n,) how many of them count; 0 if none fits."""
    sizes = dataset.sizes[documents.start : documents.stop].astype(np.int64)
    counted = np.zeros(len(sizes), np.int64)
    for i, document in enumerate(documents):
        mask = dataset.mask(document) != 0
        if sizes[i] > room:
            # An answer ends where the next token is not the assistant's.
            ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
            sizes[i] = ends[ends <= room].max(initial=0)
        counted[i] = np.count_nonzero(mask[1 : sizes[i]])
    return sizes, counted


def pack(sizes: Sequence[int] | NDArray[np.int64], room: int) -> list[list[int]]:
    """Distribute examples among rows of `room` tokens: best fit, the longest first.

    Needs at most 11/9 of the fewest rows possible (Johnson, Fast algorithms for bin packing, 1974).

    Returns:
        The examples of each row, each in the order of the data set.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # space that is left -> rows
    spaces: list[int] = []  # the keys, sorted
    for i in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        # The row with the least space that is enough; a new row if there is none.
        size = int(sizes[i])
        at = bisect.bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            space, row = room, len(rows)
            rows.append([])
        rows[row].append(i)
        if left := space - size:
            if left not in by_space:
                bisect.insort(spaces, left)
            by_space.setdefault(left, []).append(row)
    return [sorted(row) for row in rows]
