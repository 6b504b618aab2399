"""Processor time in which the host starts the operations of a training step.

The trainer takes real steps as one process of the layout, with the recipe's layers and
micro-batches, but tensors so small that their arithmetic takes next to nothing: what remains is
Python, autograd, DTensor, FSDP, the pipeline's schedule and the start of kernels. Collectives send
nothing. Kernels are a CPU's, which start about as fast as CUDA's.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lathe.plan.rank import (
    PlannedStates,
    blank_tokens,
    dense_config,
    join_fake_workers,
    make_job,
)
from lathe.plan.record import local
from lathe.train.layout import head_layers
from lathe.train.loop import Gradients, StopSaveFlags
from lathe.train.parallel import divide
from lathe.train.run import make_teacher
from lathe.train.trainer import Trainer
from lathe_base.config.settings import Recipe

WARM_UP, STEPS = 2, 4
"""Steps before the timed ones, in which autograd, DTensor and FSDP fill their caches; and these."""
MIN_TOKENS, MIN_ROWS, HEAD_DIM = 16, 8, 16
Model = TypeVar("Model", bound=nn.Module)
VALUE = 0.01  # of all weights: not 0, whose quotients are not finite


def small_recipe(recipe: Recipe) -> Recipe:
    """The recipe with sizes that keep every operation and make it small: two heads, or groups of
    heads, for each rank of tensor parallelism, and short sequences.

    A pruning is timed as training its model unpruned, and a teacher as one of the parent's shape.
    """
    model, compress, mp = recipe.Model, recipe.Compress, recipe.Distributed.mp_degree
    groups = model.num_key_value_heads or model.num_attention_heads
    # Two, since operations on a dimension of one element are views where others copy.
    small_groups = mp * max(1, min(2, groups // mp))
    heads = small_groups * (model.num_attention_heads // groups)
    # Wide enough for a group of weights with one scale in every part of a linear.
    is_quantized = compress.Quantization.enable
    head_dim = max(HEAD_DIM, compress.Quantization.group_size) if is_quantized else HEAD_DIM
    length = mp * -(-MIN_TOKENS // mp)
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": model.num_key_value_heads and small_groups,
        "head_dim": model.head_dim and head_dim,
        "hidden_size": heads * head_dim,
        "ffn_hidden_size": 2 * heads * head_dim,
        "num_layers": model.num_layers - (compress.Prune.layers if compress.Prune.enable else 0),
        "vocab_size": MIN_ROWS * mp,
        "vocab_size_divisible_unit": None,
        "max_position_embeddings": length,
        "sliding_window": model.sliding_window and length // 2,
    }
    data = {}
    for name in ("Train", "Eval"):
        part = getattr(recipe.Data, name)
        dataset = part.dataset.model_copy(update={"max_seq_len": length})
        data[name] = part.model_copy(update={"dataset": dataset})
    teacher = {"teacher": compress.Distill.teacher and "parent"}
    parts = {
        "Prune": compress.Prune.model_copy(update={"enable": False}),
        "Distill": compress.Distill.model_copy(update=teacher),
    }
    engine = {"max_steps": WARM_UP + STEPS, "compile": False}
    small = recipe.model_copy(
        update={
            "Model": model.model_copy(update=sizes),
            "Data": recipe.Data.model_copy(update=data),
            "Compress": compress.model_copy(update=parts),
            "Engine": recipe.Engine.model_copy(update=engine),
        }
    )
    # As much of a head beside a layer as the recipe's, so that stages have as many layers.
    whole_head = head_layers(dense_config(recipe), recipe.Data.Train.dataset.max_seq_len)
    factor = whole_head / head_layers(dense_config(small), length)
    rows = max(1, round(MIN_ROWS * factor))
    shape = small.Model.model_copy(update={"vocab_size": mp * rows})
    return small.model_copy(update={"Model": shape})


class _TimedTrainer(Trainer):
    """A trainer that times its steps, in seconds of this thread."""

    seconds: list[float]
    begun: float

    def backward(
        self, step: int, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags
    ) -> Callable[[], Gradients]:
        self.begun = time.thread_time()
        return super().backward(step, batches, flags)

    def after_step(self) -> None:
        super().after_step()
        self.seconds.append(time.thread_time() - self.begun)

    def validation_loss(self) -> float:
        return 0.0


def time_host(recipe: Recipe, rank: int, size: int) -> float:
    """Seconds of one thread of this machine in a step of the process `rank` of `size`, eager.

    Args:
        recipe: see `small_recipe`.

    Raises:
        UserError: the model or the batch cannot be divided as the recipe asks.
    """
    with (
        TemporaryDirectory(prefix="lathe-trial-") as folder,
        join_fake_workers(recipe, rank, size) as workers,
    ):
        job = make_job(recipe)
        stages = divide(job.model, recipe, workers)
        teacher = None
        if (model := job.teacher) is not None:
            teacher = make_teacher(recipe, lambda: _filled(model), job.model.config, workers)
        for stage in stages:
            _filled(stage)
        data = blank_tokens(recipe, workers.data_size)
        trainer = _TimedTrainer(recipe, stages, data, Path(folder), workers, teacher)
        trainer.states = PlannedStates(workers)  # type: ignore[assignment]
        trainer.seconds = []
        trainer.run()
        return min(trainer.seconds[WARM_UP:])  # the one that other processes disturbed least


@torch.no_grad()
def _filled(model: Model) -> Model:
    """Allocate the parameters and buffers of a model on the meta device, and fill them."""
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        part = local(tensor)
        part.fill_(VALUE if part.is_floating_point() else 0)
    return model
