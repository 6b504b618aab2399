"""One optimizer step of one process of a training, with fake tensors.

Fake tensors are on the CPU, `gpu_kernels` substitutes a GPU's kernels, and collectives go to
`FakeWorkers`. torch 2.13 can create fake tensors on `cuda` without a driver and run a forward pass,
but not a backward pass: its autograd engine queries the streams of every device.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils._python_dispatch import _disable_current_modes

from lathe.data.megatron import TokenArrays
from lathe.data.tokens import TokenSequences
from lathe.plan.gpu_kernels import gpu_kernels
from lathe.plan.job import TrialJob
from lathe.plan.record import Collective, Recorder
from lathe.plan.repeat import Repeats
from lathe.plan.world import join_fake_workers
from lathe.train.layout import DIMS
from lathe.train.loop import Gradients, StopSaveFlags
from lathe.train.parallel import divide
from lathe.train.run import make_teacher
from lathe.train.trainer import Trainer
from lathe.train.workers import Workers
from lathe_base.config.settings import Recipe


@dataclass(frozen=True)
class RankTrial:
    """Results of one process.

    Attributes:
        at: its coordinate in each of `lathe.train.layout.DIMS`.
        memory: bytes by category at the fullest moment; see `Recorder.kinds`.
        flops: by phase.
        collectives: in order.
        saved: what it would write of a saved state.
    """

    rank: int
    at: Mapping[str, int]
    memory: Mapping[str, int]
    flops: Mapping[str, int]
    collectives: Sequence[Collective]
    saved: SavePlan

    @property
    def peak(self) -> int:
        """Peak memory, in bytes."""
        return sum(self.memory.values())


def try_rank(
    recipe: Recipe, job: TrialJob, rank: int, size: int, on_gpu: bool, repeats: bool = True
) -> RankTrial:
    """Run a step, a validation batch and a save as the process `rank` of `size`.

    This is the second step: the first follows a validation, after which FSDP need not gather the
    weights.

    Args:
        on_gpu: whether to choose a GPU's kernels, or a CPU's.
        repeats: whether a stage of a pipeline may repeat its passes; see `Repeats`.

    Raises:
        UserError: the model or the batch cannot be divided as the recipe asks.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="lathe-trial-")))
        workers = stack.enter_context(join_fake_workers(recipe, rank, size))
        stages = divide(job.model, recipe, workers)
        stack.enter_context(recorder)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        teacher = None
        with fake:
            for stage in stages:
                stage.to_empty(device=workers.device)
            if given := job.teacher:
                teacher = make_teacher(recipe, lambda: given, job.model.config, workers)
        observe = job.observe(workers) if job.observe else None
        data = blank_tokens(recipe, workers.data_size)
        trainer = _TriedTrainer(recipe, stages, data, folder, workers, observe, teacher)
        trainer.recorder, states = recorder, _PlannedStates(workers)
        trainer.states = states  # type: ignore[assignment]
        trainer.categorize(*([teacher.model] if teacher else []))
        begin = len(recorder.allocations)
        trainer.at.step = 1
        if on_gpu:
            stack.enter_context(gpu_kernels())
        with fake:
            for stage in stages[: len(stages) - stages[-1].is_last] if repeats else ():
                stage.forward = Repeats(stage.forward, recorder)  # type: ignore[method-assign]
            trainer.run()
        return RankTrial(
            rank=rank,
            at={dim: workers.at(dim) for dim in DIMS},
            memory=recorder.peak(begin),
            flops=recorder.flops,
            collectives=[call for call in recorder.collectives if call.phase != "build"],
            saved=states.plan,
        )


class _TriedTrainer(Trainer):
    """A trainer that tells the recorder what it is doing."""

    recorder: Recorder

    def categorize(self, *others: torch.nn.Module) -> None:
        """Categorize the tensors that exist before the first step."""
        modules = [*(stage.gpt for stage in self.stages), *others]
        tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        self.recorder.categorize(tensors, "weights")
        states = self.optimizer.state.values()
        self.recorder.categorize([x for state in states for x in state.values()], "optimizer")

    def backward(self, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags) -> Gradients:
        self.recorder.phase = "forward and backward"
        result = super().backward(batches, flags)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.recorder.categorize(gradients, "gradients")
        return result

    def update(self, rate: float, norm: float) -> None:
        self.recorder.phase = "update"
        super().update(rate, norm)

    def after_step(self) -> None:
        self.recorder.phase = "after the step"
        super().after_step()

    def validation_loss(self) -> float:
        self.recorder.phase = "validation"
        return super().validation_loss()

    def save(self) -> None:
        self.recorder.phase = "save"
        super().save()


class _PlannedStates:
    """Saves and loads as torch.distributed.checkpoint does until it would access a file: which
    parts of which tensors this process writes, and whether it would find its own."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.plan = workers, SavePlan([])

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        with _disable_current_modes():  # it computes with the offsets of shards
            self.plan = create_default_local_save_plan(dict(tensors), self.workers.is_first)
            _, metadata = create_default_global_save_plan([self.plan])
            create_default_local_load_plan(dict(tensors), metadata)

    def newest(self) -> None:
        pass

    def poll(self) -> None:
        pass

    def wait(self) -> None:
        pass


def blank_tokens(recipe: Recipe, data_size: int) -> TokenSequences:
    """A training and a validation document; the second fills one micro-batch of every replica."""
    T, micro = recipe.Data.Train.dataset.max_seq_len, recipe.Global.micro_batch_size
    sizes = np.array([T + 1, micro * data_size * T + 1], np.int32)
    starts = np.array([0, *accumulate(sizes[:-1])])
    tokens = np.zeros(sizes.sum(), np.uint16)
    return TokenSequences(Path(), {}, TokenArrays(tokens, starts, sizes, np.arange(3)))
