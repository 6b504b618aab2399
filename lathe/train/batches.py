"""Batch sizes, and the tokens of every step: a pure function of recipe, step and worker, so no
state is saved.

A global batch is divided among the data-parallel ranks, and a rank's local batch into the
micro-batches whose gradients it accumulates.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.data.chat_samples import ChatSamples
from lathe.data.samples import BlendedSamples, Samples, Share, draw, split_sequences
from lathe.data.tokenizer import require_same_vocabulary, vocab_size
from lathe.data.tokens import TokenDataset
from lathe.model.config import GPTConfig
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_serving.runtime.text import bos_ids

log = logging.getLogger("lathe")

MAX_USEFUL_EPOCHS = 4
"""Number of epochs up to which repeated text is almost as good as new text (Muennighoff et al.,
Scaling data-constrained language models, 2023, arXiv:2305.16264)."""


@dataclass(frozen=True)
class Batch:
    """Numbers of sequences: per optimizer step (`total`), per rank, and per forward pass."""

    total: int
    local: int
    micro: int
    accumulate_steps: int

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return self.total // self.local


def resolve_batch(recipe: Recipe, data_parallel: int) -> Batch:
    """Derive the sizes that the recipe omits, for `data_parallel` = dp_degree * sharding_degree.

    `Global.local_batch_size` follows from `global_batch_size`, or else is one micro-batch for each
    of `Engine.accumulate_steps` (default 1).

    Raises:
        UserError: the sizes do not divide, or two of them disagree.
    """
    sizes, steps = recipe.Global, recipe.Engine.accumulate_steps
    total, local, micro = sizes.global_batch_size, sizes.local_batch_size, sizes.micro_batch_size
    if total is not None and total % data_parallel:
        raise UserError(
            f"Global.global_batch_size {total} is not a multiple of {data_parallel}, the number of "
            "data-parallel ranks (dp_degree * sharding_degree)",
            f"set it to {(total // data_parallel + 1) * data_parallel}, or change the degrees",
            Code.LAYOUT,
        )
    if local is None:
        local = micro * (steps or 1) if total is None else total // data_parallel
    if total is not None and total != local * data_parallel:
        raise UserError(
            f"Global.global_batch_size {total} is not local_batch_size {local} "
            f"* {data_parallel} data-parallel ranks",
            "fix one of the two, or leave it empty",
            Code.CONFLICTING_OPTIONS,
        )
    if local % micro:
        raise UserError(
            f"Global.local_batch_size {local} is not a multiple of micro_batch_size {micro}",
            "choose a micro_batch_size that divides it",
            Code.CONFLICTING_OPTIONS,
        )
    if steps not in (None, local // micro):
        raise UserError(
            f"Engine.accumulate_steps {steps} is not local_batch_size {local} / "
            f"micro_batch_size {micro} = {local // micro}",
            "leave accumulate_steps empty to compute it from the two",
            Code.CONFLICTING_OPTIONS,
        )
    return Batch(local * data_parallel, local, micro, local // micro)


class TrainBatches:
    """Micro-batches of one data-parallel rank.

    A thread prefetches the next step's while a step computes. Steps may be requested in any order;
    one that was not prefetched is read immediately. `close` ends the thread.

    Args:
        packs: whether conversations share samples; default: with `Data.reset_attention`.
        steps: number of steps to draw samples for, if more than `Engine.max_steps`; then they
            repeat.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: TokenDataset,
        batch: Batch,
        rank: int,
        packs: bool | None = None,
        steps: int = 1,
    ) -> None:
        settings = recipe.Data.Train.dataset
        self.batch, self.rank = batch, rank
        # Samples for the whole run are drawn at the start: positions only, no tokens are read.
        training = [
            Share(weight, part, range(split_sequences(settings.split, part.arrays)[1]))
            for weight, part in data.parts
        ]
        count = max(steps, recipe.Engine.max_steps) * batch.total
        packs = recipe.Data.reset_attention if packs is None else packs
        self.samples = draw(training, settings.max_seq_len, count, recipe.Global.seed, packs)
        self.has_masks = any(part.has_mask for _, part in data.parts)
        self._bos = data.bos
        self.samples_per_epoch = self.samples.per_epoch
        self._thread = ThreadPoolExecutor(1, "batches")
        self._step: int | None = None
        self._arrays: list[NDArray[np.int64]] = []
        self._ahead: tuple[int, Future[list[NDArray[np.int64]]]] | None = None

    def __call__(self, step: int, accumulation: int) -> NDArray[np.int64]:
        """Tokens (micro, T + 1) of the `step`-th update, from 0. A step's samples do not depend on
        the number of ranks, only their assignment to ranks does."""
        if step != self._step:
            ahead, self._ahead = self._ahead, None
            self._arrays = (
                ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
            )
            self._step = step
            self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return self._arrays[accumulation]

    def documents(self, step: int, accumulation: int) -> list[str]:
        """The documents that each sample of a micro-batch spans, counted from 0 in the data set:
        e.g. `17, 4`, or for a blend, with the part's folder, `1-novels 17, 4`."""
        indexes = self._indexes(step, accumulation)
        return [self.samples.origin(i % len(self.samples)) for i in indexes]

    def seen_tokens(self, steps: int) -> dict[str, int]:
        """Tokens that `steps` updates read from each part of a blend; empty for a plain data
        set."""
        counts = self.samples.counts(steps * self.batch.total)
        tokens = {part.dataset.folder.name: n * part.seq_len for part, n in counts}
        return tokens if len(tokens) > 1 else {}

    def announce(self, steps: int) -> None:
        """Log how many epochs of each source `steps` updates read, and warn of small ones in a
        blend."""
        counts = self.samples.counts(steps * self.batch.total)
        for part, n in counts:
            name, epochs = part.dataset.folder.name, n / part.per_epoch
            if isinstance(part, ChatSamples) and (part.cut or part.dropped):
                log.warning(
                    "%s: of %d conversations, %d are longer than %d tokens and end with the last "
                    "answer that fits, and %d are left out, because their first one does not",
                    *(name, len(part.sizes), part.cut, part.seq_len + 1, part.dropped),
                )
            share = f"{n / (steps * self.batch.total):.1%} of the samples, " if counts[1:] else ""
            tokens = f"{n * part.seq_len:,} tokens"
            log.info("training data %s: %s%s, %.2f epochs", name, share, tokens, epochs)
            if counts[1:] and epochs > MAX_USEFUL_EPOCHS:
                log.warning(
                    "%s is small for its weight: it will be read %.1f times. Text repeated more "
                    "than %d times is worth less and less; lower its weight in the blend",
                    *(name, epochs, MAX_USEFUL_EPOCHS),
                )

    def positions(self, step: int, accumulation: int) -> NDArray[np.int64]:
        """Position of every input token of a micro-batch in its document, (micro, T); a document
        that began in another sample begins at 0 again."""
        indexes, n = self._indexes(step, accumulation), len(self.samples)
        return np.stack([self.samples.positions(i % n) for i in indexes])

    def masks(self, step: int, accumulation: int) -> NDArray[np.bool_]:
        """Whether each target of a micro-batch counts, (micro, T)."""
        indexes, n = self._indexes(step, accumulation), len(self.samples)
        return np.stack([self.samples.mask(i % n)[1:] for i in indexes])

    def counted_tokens(self, step: int) -> int:
        """Number of targets that count in the global batch of a step."""
        first, samples = step * self.batch.total, self.samples
        rows = range(first, first + self.batch.total)
        return sum(samples.counted_tokens(i % len(samples)) for i in rows)

    def close(self) -> None:
        """Wait for the prefetch in progress, and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _indexes(self, step: int, accumulation: int) -> range:
        """Numbers of a micro-batch's samples in the run. Consecutive micro-batches of the global
        batch go to consecutive ranks, so that with any number of ranks a step has the same."""
        b = self.batch
        first = step * b.total + (accumulation * b.data_parallel + self.rank) * b.micro
        return range(first, first + b.micro)

    def _read(self, step: int) -> list[NDArray[np.int64]]:
        accumulations, n = range(self.batch.accumulate_steps), len(self.samples)
        return [
            _stacked([self.samples[i % n] for i in self._indexes(step, accumulation)], self._bos)
            for accumulation in accumulations
        ]


class EvalBatches:
    """The same validation samples at every evaluation, in micro-batches divided among the workers.

    If there are enough samples for one full batch, all batches are full and the rest is dropped, so
    that the samples do not depend on the parallel layout. A part of a blend whose validation
    documents cannot fill one sequence is left out.

    Args:
        batch_size: sequences per batch; `batches` batches are read.
        micro: sequences per micro-batch, a divisor of `batch_size`; default: the whole batch.
        packs: see `TrainBatches`.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: TokenDataset,
        batch_size: int,
        batches: int,
        micro: int | None = None,
        packs: bool | None = None,
    ) -> None:
        settings = recipe.Data.Eval.dataset
        packs = recipe.Data.reset_attention if packs is None else packs
        # Count the samples of each part, without drawing any.
        seq_len, available, shares = settings.max_seq_len, 0, []
        for weight, part in data.parts:
            bounds = split_sequences(settings.split, part.arrays)
            documents, packed = range(bounds[1], bounds[2]), None
            if part.has_mask:
                with suppress(UserError):  # no example fits
                    packed = ChatSamples(part, documents, seq_len, 0, 0, packs)
                rows = packed.per_epoch if packed else 0
            else:
                tokens = part.sizes[documents.start : documents.stop].sum(dtype=np.int64)
                rows = max(0, int(tokens - 1) // seq_len)
            available += rows
            if rows:
                shares.append(Share(weight, part, documents, packed))
            elif len(data.parts) > 1:
                log.warning(
                    "%s: too few validation documents, skipping validation on it", part.folder
                )
        self.micro = micro or batch_size
        self.count = min(available, batch_size * batches)
        if self.count >= batch_size:
            self.count -= self.count % batch_size
        self.has_masks = any(part.has_mask for _, part in data.parts)
        self._bos = data.bos
        self.samples: Samples | ChatSamples | BlendedSamples | None = None
        self._rows: list[NDArray[np.intp]] = []  # of each micro-batch
        self._sets: list[str] = []
        if self.count:
            self.samples = draw(shares, seq_len, self.count, 0, packs)
            # In a blend with conversations a micro-batch has samples of one data set only.
            apart = [("", np.arange(self.count))]
            if isinstance(self.samples, BlendedSamples) and self.has_masks:
                at = self.samples.part_idx[: self.count]
                folders = [share.dataset.folder.name for share in shares]
                apart = [(name, np.flatnonzero(at == i)) for i, name in enumerate(folders)]
            for name, members in apart:
                ends = range(self.micro, len(members), self.micro)
                micro_batches = np.split(members, ends)
                self._rows += [part for part in micro_batches if len(part)]
                self._sets += [name] * (len(self._rows) - len(self._sets))

    @property
    def sets(self) -> list[str]:
        """The data sets of a blend with conversations, whose losses are reported apart: in one
        number, those of conversations and of text say nothing."""
        return [name for name in dict.fromkeys(self._sets) if name]

    def set_index(self, index: int) -> int | None:
        """Index in `sets` of a micro-batch's data set."""
        return self.sets.index(self._sets[index]) if self._sets[index] else None

    def __len__(self) -> int:
        """Number of micro-batches; 0 if the validation part cannot fill one sequence."""
        return len(self._rows)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Tokens (micro, T + 1), or fewer rows if there are no more."""
        if not 0 <= index < len(self) or self.samples is None:
            raise IndexError(index)
        return _stacked([self.samples[i] for i in self._rows[index].tolist()], self._bos)

    def positions(self, index: int) -> NDArray[np.int64]:
        """See `TrainBatches.positions`."""
        assert self.samples is not None
        return np.stack([self.samples.positions(i) for i in self._rows[index].tolist()])

    def masks(self, index: int) -> NDArray[np.bool_]:
        """See `TrainBatches.masks`."""
        assert self.samples is not None
        return np.stack([self.samples.mask(i)[1:] for i in self._rows[index].tolist()])


def _stacked(samples: Sequence[NDArray[np.int64]], bos: Sequence[int]) -> NDArray[np.int64]:
    """Samples (B, T + 1), whose first token is `bos`, if there is one."""
    tokens = np.stack(samples)
    tokens[:, : len(bos)] = bos
    return tokens


def calibration_batches(
    recipe: Recipe, data: TokenDataset, count: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """`count` micro-batches (B, T) of training text, by default
    `Sensitivity.calibration_batches`."""
    for tokens in first_batches(recipe, data, count or recipe.Sensitivity.calibration_batches):
        yield tokens[:, :-1]


def first_batches(recipe: Recipe, data: TokenDataset, count: int) -> Iterator[NDArray[np.int64]]:
    """`count` micro-batches (B, T + 1) of training text, read on one process. Conversations are
    packed, because statistics of samples that are mostly padding would be those of the padding."""
    micro = recipe.Global.micro_batch_size
    batch = Batch(micro, micro, micro, 1)
    with closing(TrainBatches(recipe, data, batch, rank=0, packs=True, steps=count)) as batches:
        for step in range(count):
            yield batches(step, 0)


def open_data(
    folder: Path, recipe: Recipe, config: GPTConfig, tokenizer: Tokenizer
) -> TokenDataset:
    """Open a token data set, or a blend, for a model with this configuration and tokenizer.

    Samples begin anywhere in a document. If the tokenizer prepends a token to every text, it
    replaces the first token of every sample: a model like Gemma 3, which has read no text without
    it, predicts every token worse otherwise (WikiText's perplexity is 29 in place of 18), and would
    be trained, calibrated and pruned for input that it never gets. What is predicted stays the
    same, because the first token of a sample is input only.

    Token files of another tool without a tokenizer are taken to be in the model's ids.

    Raises:
        UserError: the data has another tokenizer, or its vocabulary or sequence length exceeds the
            model's.
    """
    data = TokenDataset.open(folder)
    require_same_vocabulary(folder, tokenizer)
    size = data.vocab_size if data.has_vocabulary else vocab_size(tokenizer)
    if not data.has_vocabulary:
        data.require_ids(size)
        log.info("%s: no tokenizer beside the tokens; reading them with the model's", folder)
    if size > config.vocab_size:
        raise UserError(
            f"{folder}: its vocabulary has {size} ids, but the model's has {config.vocab_size}",
            "prepare the data with the model's tokenizer, or set Model.vocab_size",
            Code.WRONG_TOKENIZER,
        )
    for part in ("Train", "Eval"):
        length = getattr(recipe.Data, part).dataset.max_seq_len
        if length > config.n_positions:
            raise UserError(
                f"Data.{part}.dataset.max_seq_len {length} exceeds the model's "
                f"{config.n_positions} positions",
                "lower it, or raise Model.max_position_embeddings",
                Code.TOO_LONG,
            )
    return replace(data, bos=tuple(bos_ids(tokenizer)))
