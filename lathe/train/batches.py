"""Which tokens a step sees: a pure function of recipe, step and worker, so nothing is stored."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lathe.data.samples import Samples, split_boundaries
from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.settings import Recipe
from lathe.train.batch import Batch


class TrainBatches:
    """Micro-batches of one worker."""

    def __init__(self, recipe: Recipe, data: TokenDataset, batch: Batch, rank: int) -> None:
        settings = recipe.Data.Train.dataset
        bounds = split_boundaries(settings.split, len(data.sizes))
        self.batch, self.rank = batch, rank
        tokens = int(data.sizes[bounds[0] : bounds[1]].sum(dtype=np.int64))
        self.samples_per_epoch = max(1, (tokens - 1) // settings.max_seq_len)
        self.samples = Samples(
            data,
            range(bounds[0], bounds[1]),
            settings.max_seq_len,
            recipe.Engine.max_steps * batch.total,
            recipe.Global.seed,
        )

    def __call__(self, step: int, accumulation: int) -> Tensor:
        """Tokens (micro, T + 1) of the `step`-th update, counted from 0. A step's samples are the
        same whatever the number of workers: only who computes them changes."""
        b = self.batch
        first = step * b.total + (accumulation * b.data_parallel + self.rank) * b.micro
        return _stack(self.samples, range(first, first + b.micro))


class EvalBatches:
    """The same validation batches at every evaluation, divided among the workers."""

    def __init__(
        self, recipe: Recipe, data: TokenDataset, batch_size: int, batches: int, seed: int = 0
    ) -> None:
        settings = recipe.Data.Eval.dataset
        bounds = split_boundaries(settings.split, len(data.sizes))
        documents = range(bounds[1], bounds[2])
        available = max(int(data.sizes[bounds[1] : bounds[2]].sum()) - 1, 0)
        self.count = min(available // settings.max_seq_len, batch_size * batches)
        self.batch_size = batch_size
        self.samples: Samples | None = None
        if self.count:
            self.samples = Samples(data, documents, settings.max_seq_len, self.count, seed)

    def __len__(self) -> int:
        """0 where the validation part cannot fill one sequence."""
        return -(-self.count // self.batch_size)

    def __getitem__(self, index: int) -> Tensor:
        """Tokens (<= batch_size, T + 1)."""
        if not 0 <= index < len(self) or self.samples is None:
            raise IndexError(index)
        first = index * self.batch_size
        return _stack(self.samples, range(first, min(first + self.batch_size, self.count)))


def calibration_batches(recipe: Recipe, data: TokenDataset) -> Iterator[Tensor]:
    """`Sensitivity.calibration_batches` micro-batches (B, T) of training text."""
    micro = recipe.Global.micro_batch_size
    batches = TrainBatches(recipe, data, Batch(micro, micro, micro, 1), rank=0)
    for step in range(recipe.Sensitivity.calibration_batches):
        yield batches(step, 0)[:, :-1]


def open_data(folder: Path, recipe: Recipe, vocab_size: int, n_positions: int) -> TokenDataset:
    """Open a token data set for a model of these limits.

    Raises:
        UserError: the vocabulary or the sequence length exceeds the model's.
    """
    data = TokenDataset.open(folder)
    if data.vocab_size > vocab_size:
        raise UserError(
            f"{folder}: tokens of a {data.vocab_size}-id vocabulary, the model has {vocab_size}",
            "prepare the data with the model's tokenizer, or set Model.vocab_size",
        )
    for part in ("Train", "Eval"):
        length = getattr(recipe.Data, part).dataset.max_seq_len
        if length > n_positions:
            raise UserError(
                f"Data.{part}.dataset.max_seq_len {length} exceeds the model's {n_positions} "
                "positions",
                "lower it, or raise Model.max_position_embeddings",
            )
    return data


def _stack(samples: Samples, indexes: range) -> Tensor:
    return torch.from_numpy(np.stack([samples[i % len(samples)] for i in indexes]))
