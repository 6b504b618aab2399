"""One optimizer step of one process of a training, with fake tensors.

Fake tensors are on the CPU, `gpu_kernels` substitutes a GPU's kernels, and collectives go to
`FakeWorkers`. torch 2.13 can create fake tensors on `cuda` without a driver and run a forward pass,
but not a backward pass: its autograd engine queries the streams of every device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from lathe.compress.plan import named_formats
from lathe.compress.prune import cut
from lathe.compress.quantize import insert_fake_quantization
from lathe.compress.widths import keep_layers
from lathe.data.megatron import TokenArrays
from lathe.data.tokens import TokenSequences
from lathe.model import lora
from lathe.model.config import GPTConfig, read_config
from lathe.model.gpt import GPT
from lathe.plan.record import Collective, Recorder
from lathe.plan.repeat import Repeats
from lathe.train.finetune import frozen_dtype
from lathe.train.layout import DIMS
from lathe.train.loop import Gradients, StopSaveFlags
from lathe.train.parallel import divide
from lathe.train.pretrain import new_model
from lathe.train.run import make_teacher
from lathe.train.shape import model_config, recipe_stage
from lathe.train.trainer import Trainer
from lathe.train.workers import Workers, make_mesh
from lathe_base.config.settings import Recipe

T = TypeVar("T")

FAKE_VALUES = (1.0, 1e4, 0.0, 0.0)
"""Made-up values that the host reads: a step's loss and squared gradient norm, and no requests to
stop or save; in validation, the loss of one sample. All others are 0."""


@dataclass(frozen=True)
class TrialJob:
    """A model without values, and what else its training needs.

    Attributes:
        model: on the meta device.
        teacher: on the meta device; None without distillation.
    """

    model: GPT
    teacher: GPT | None = None


def dense_config(recipe: Recipe) -> GPTConfig:
    """Shape of the model that the recipe trains, or that its stage starts from, with the recipe's
    vocabulary."""
    return model_config(recipe, recipe.Prepare.vocab_size)


def make_job(recipe: Recipe) -> TrialJob:
    """The training of the recipe's stage.

    Choices that depend on data are approximated: global pruning by the same share of every layer,
    several rounds by the first, which leaves the most, the least important layers by the last ones,
    and `auto` scales by static ones.

    Raises:
        UserError: a setting or a linear that the model's family does not have.
    """
    config, stage = dense_config(recipe), recipe_stage(recipe)
    with torch.device("meta"):
        model, teacher = new_model(config, recipe.Model), None
        if folder := recipe.Compress.Distill.teacher:
            teacher = GPT(config if folder == "parent" else read_config(Path(folder)))
        if stage == "finetune":
            lora.insert(model, recipe.Finetune.lora, frozen_dtype(recipe))
        if stage == "prune":
            settings = recipe.Compress.Prune
            if settings.layers:
                model = keep_layers(model, range(max(1, config.n_layer - settings.layers)))
            known = {"criterion": "l1_norm", "scope": "uniform", "layers": 0}
            model = cut(model, settings.model_copy(update=known), config)
        if stage == "quantize":
            formats = named_formats(config, recipe.Compress.Quantization, None)
            model = insert_fake_quantization(model, recipe, formats)[0]
    return TrialJob(model, teacher)


@dataclass(frozen=True)
class RankTrial:
    """Results of one process.

    Attributes:
        at: its coordinate in each of `lathe.train.layout.DIMS`.
        memory: bytes by category at the fullest moment; see `Recorder.kinds`.
        flops, operations: by phase; see `Recorder`.
        collectives: in order.
        saved: what it would write of a saved state.
    """

    rank: int
    at: Mapping[str, int]
    memory: Mapping[str, int]
    flops: Mapping[str, int]
    operations: Mapping[str, int]
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
    # The model is divided as on the real process, and its parts become fake tensors: shapes and
    # dtypes without values. From there on, everything runs through the trainer's own code.
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
            if teacher_model := job.teacher:
                teacher = make_teacher(recipe, lambda: teacher_model, job.model.config, workers)
        data = blank_tokens(recipe, workers.data_size)
        trainer = _TriedTrainer(recipe, stages, data, folder, workers, teacher)
        trainer.recorder, states = recorder, PlannedStates(workers)
        trainer.states = states  # type: ignore[assignment]
        trainer.categorize(*([teacher.model] if teacher else []))

        # Only what is allocated from here on can be the peak.
        begin = len(recorder.allocations)
        trainer.at.step = 1
        if on_gpu:
            stack.enter_context(gpu_kernels())
        with fake:
            # All stages but the pipeline's last one.
            for stage in stages[: len(stages) - stages[-1].is_last] if repeats else ():
                stage.forward = Repeats(stage.forward, recorder)  # type: ignore[method-assign]
            trainer.run()
        return RankTrial(
            rank=rank,
            at={dim: workers.at(dim) for dim in DIMS},
            memory=recorder.peak(begin),
            flops=recorder.flops,
            operations=recorder.operations,
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
        tensors += [*self.half_weights.copies.values()] if self.half_weights else []
        self.recorder.categorize(tensors, "weights")
        states = self.optimizer.state.values()
        self.recorder.categorize([x for state in states for x in state.values()], "optimizer")

    def backward(
        self, step: int, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags
    ) -> Callable[[], Gradients]:
        self.recorder.phase = "forward and backward"
        result = super().backward(step, batches, flags)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.recorder.categorize(gradients, "gradients")
        return result

    def update(self, rate: float) -> None:
        self.recorder.phase = "update"
        super().update(rate)

    def after_step(self) -> None:
        self.recorder.phase = "after the step"
        super().after_step()

    def validation_loss(self) -> float:
        self.recorder.phase = "validation"
        return super().validation_loss()

    def save(self) -> None:
        self.recorder.phase = "save"
        super().save()


class PlannedStates:
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
    # Shapes follow from lengths alone; all ids are 0.
    T, micro = recipe.Data.Train.dataset.max_seq_len, recipe.Global.micro_batch_size
    sizes = np.array([T + 1, micro * data_size * T + 1], np.int32)
    starts = np.array([0, *accumulate(sizes[:-1])])
    tokens = np.zeros(sizes.sum(), np.uint16)
    return TokenSequences(Path(), {}, TokenArrays(tokens, starts, sizes, np.arange(3)))


class FakeWorkers(Workers):
    """Workers whose peers do not exist; values from them are made up."""

    def read(self, values: Tensor) -> Callable[[], list[float]]:
        count = len(values)
        return lambda: [*FAKE_VALUES, *(0.0 for _ in range(count))][:count]

    def agree(self, value: Callable[[], T]) -> T:
        return value()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass


class _Votes:
    """The stages of a pipeline vote before the first pass whether all know their shapes, which
    those of `lathe.train.passes` do: the result of torch's protocol is given, not received."""

    def __enter__(self) -> None:
        self._original = original = PipelineStage._warmup_backward_result

        def agreed(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
            result = original(stage, received_result)
            if not isinstance(result, FakeTensor):
                return torch.ones_like(result)
            with unset_fake_temporarily():
                # The value that torch reads from a fake tensor where it has one.
                result.constant = torch.tensor([1], dtype=result.dtype)
            return result

        PipelineStage._warmup_backward_result = agreed  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        PipelineStage._warmup_backward_result = self._original  # type: ignore[method-assign]


@contextmanager
def join_fake_workers(recipe: Recipe, rank: int, size: int) -> Iterator[FakeWorkers]:
    """Act as process `rank` of `size`, alone: collectives send nothing.

    Raises:
        UserError: the recipe's degrees do not multiply to `size`.
    """
    # torch's backend for tests: all others of the group are missing, and nobody waits for them.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        device = torch.device("cpu")
        mesh = make_mesh(recipe, device)
        with _Votes():
            yield FakeWorkers(rank, size, device, mesh, dist.new_group(backend="fake"))
    finally:
        dist.destroy_process_group()


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Make `torch.nn.functional` call the kernels that a CUDA device would run, which keep other
    tensors for the backward pass.

    Fake tensors are on the CPU, and torch chooses kernels by device: there, attention with dropout
    materializes its scores, dropout keeps a float mask, RMSNorm is not fused, and autocast leaves
    norms in half precision.

    A TorchFunctionMode would not do: it is off while the backward pass recomputes activations.
    """
    originals = {name: getattr(F, name) for name in REPLACED}
    try:
        for name, function in REPLACED.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(F, name, function)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention in half precision, memory-efficient attention in float32 or with a mask; only
    FlashAttention does not expand shared keys and values."""
    # Autocast casts the arguments of the public function, not of the kernels called here.
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.dtype != torch.float32 and mask is None:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout, is_causal, scale=scale
        )[0]
        return out
    if enable_gqa and q.shape[1] != k.shape[1]:
        per_group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    bias = None
    if mask is not None:
        # The kernel takes an additive bias of the dtype of the queries, expanded but not copied.
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.expand(*q.shape[:2], *mask.shape[-2:])
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, q.requires_grad, dropout, is_causal, scale=scale
    )[0]
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    input, weight, bias = _wide(input, weight, bias)
    return torch.layer_norm(input, normalized_shape, weight, bias, eps)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    input, weight = _wide(input, weight)
    out: Tensor = torch._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return out


def _wide(*tensors: Tensor | None) -> Any:
    """In float32 under autocast, as on CUDA; on a CPU autocast does not."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(None if x is None else x.float() for x in tensors)


REPLACED: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
