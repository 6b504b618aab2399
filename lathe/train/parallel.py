"""Distribute a GPT over the mesh of processes with torch's own libraries.

`pp` cuts the layers into stages, `mp` splits every linear and the vocabulary (tensor parallelism
of Megatron-LM, Shoeybi et al. 2019; with sequence parallelism, Korthikanti et al. 2022), `dp` and
`sharding` divide the batch, and `sharding` the optimizer, gradients and weights too (ZeRO,
Rajbhandari et al. 2020, stages 1 to 3, by FSDP2).
"""

import copy
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lathe.model.block import rotary_table
from lathe.model.fake_quant import CacheRounding, FakeQuantLinear, RoundGroups
from lathe.model.gpt import GPT, Embedding
from lathe.model.lora import LoraLinear
from lathe.train import float8
from lathe.train.distill import Guidance, Teacher, distillation_loss
from lathe.train.float8 import require_float8
from lathe.train.layout import Layout, configured_layout, stage_layers
from lathe.train.loss import compute_dtypes, linear_cross_entropy
from lathe.train.workers import Workers
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

Weights = Callable[[str, torch.Size], Tensor]
"""Returns the whole tensor, on the CPU, of a parameter or buffer given its name in `GPT`."""


class Documents(NamedTuple):
    """The documents of a micro-batch, if attention ends at their boundaries.

    Attributes:
        sizes: tokens of each document, over all rows.
        positions: (B, T) of every token in its document, on the stage's device.
    """

    sizes: tuple[int, ...]
    positions: Tensor


class Counted(NamedTuple):
    """The tokens of a micro-batch whose loss counts, if not all do.

    Attributes:
        indices: (n,) their positions among the B T targets, on the stage's device.
        share: what their mean loss counts in the loss of the global batch, times the number of
            data-parallel ranks, whose gradients are averaged.
    """

    indices: Tensor
    share: float


class Stage(nn.Module):
    """Consecutive layers of a GPT: reads ids (B, T) if it is the first and hidden states
    (B, T, C) if not, and returns hidden states; the last one's are ready for the head.

    With sequence parallelism the hidden states are this process's T / mp tokens.

    Attributes:
        documents: those of the next forward passes, in the order of the micro-batches, because a
            pipeline schedule passes on nothing but hidden states.
    """

    documents: Iterator[Documents] | None = None

    def __init__(self, gpt: GPT, index: int, count: int, recipe: Recipe, workers: Workers) -> None:
        super().__init__()
        self.gpt, self.index, self.count = gpt, index, count
        self.mp = workers.mesh["mp"]
        self.sequence_parallel = self.mp.size() > 1 and recipe.Model.sequence_parallel
        precision = recipe.Engine.mix_precision
        self.device_type, self.dtype = workers.device.type, getattr(torch, precision.dtype)
        self.compiles = recipe.Engine.compile
        # Pure 16-bit weights need no casts.
        self.autocast = self.dtype != torch.float32 and not precision.is_pure

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.index == self.count - 1

    def forward(self, x: Tensor) -> Tensor:
        """Ids (B, T) or hidden states (B, T, C) -> hidden states (B, T, C)."""
        sizes, positions = next(self.documents) if self.documents else (None, None)
        if positions is not None:
            positions = positions + self.gpt.config.n_prefix
        with torch.autocast(self.device_type, self.dtype, self.autocast):
            if self.is_first:
                x = self.gpt.embed(x, positions)
            x = self.gpt.transform(x, sizes, positions=positions)
            return self.gpt.final_norm(x) if self.is_last else x

    def ask(self, teacher: Teacher, tokens: Tensor, documents: Documents | None = None) -> Guidance:
        """Return the teacher's output for ids (B, T), in this stage's precision."""
        sizes, positions = documents or (None, None)
        with torch.autocast(self.device_type, self.dtype, self.autocast):
            return teacher(tokens, sizes, positions)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        guide: Guidance | None = None,
        counted: Counted | None = None,
    ) -> Tensor:
        """Mean cross-entropy, nats per token, of `targets` (B, T) after the last stage's output;
        with a teacher's guidance the distillation loss. With `counted`, the mean over those tokens;
        for others, no logits are computed."""
        if self.sequence_parallel:
            whole = DTensor.from_local(hidden, self.mp, [Shard(1)]).redistribute(
                self.mp, [Replicate()]
            )
            hidden = whole.to_local()
        if counted is not None:
            hidden, targets = (_chosen(x, counted.indices) for x in (hidden, targets))
            if guide is not None:
                guide = replace(guide, hidden=_chosen(guide.hidden, counted.indices))
        if self.gpt.head_input is not None:
            hidden = self.gpt.head_input(hidden)
        table = self.gpt.output.table()
        group = None
        if isinstance(table, DTensor):
            table, group = table.to_local(), self.mp.get_group()
        with torch.autocast(self.device_type, self.dtype, self.autocast):
            if guide is not None:
                return distillation_loss(hidden, table, targets, guide)
            return linear_cross_entropy(hidden, table, targets, group, self.compiles)


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """(B, T, ...) -> (1, n, ...), the tokens of an index."""
    return x.flatten(0, 1).index_select(0, index)[None]


def build_stages(model: GPT, weights: Weights, recipe: Recipe, workers: Workers) -> list[Stage]:
    """This process's stages of `model` on its device, filled from `weights`.

    Args:
        model: see `divide`.

    Raises:
        UserError: see `divide`.
    """
    stages = divide(model, recipe, workers)
    for stage in stages:
        stage.to_empty(device=workers.device)
        with torch.no_grad():
            for name, tensor in [*stage.gpt.named_parameters(), *stage.gpt.named_buffers()]:
                value = weights(name, tensor.shape)
                if isinstance(tensor, DTensor):
                    # torch has no public function for where a process's share of a tensor begins.
                    shape, offset = compute_local_shape_and_global_offset(
                        tensor.shape, tensor.device_mesh, tensor.placements
                    )
                    share = [slice(o, o + n) for o, n in zip(offset, shape, strict=True)]
                    value, tensor = value[tuple(share)], tensor.to_local()
                tensor.copy_(value)
    return stages


def divide(model: GPT, recipe: Recipe, workers: Workers) -> list[Stage]:
    """This process's stages of `model` on the meta device, its tensors already those of one shard.

    Args:
        model: gives structure and settings; its own tensors may be on the meta device.

    Raises:
        UserError: as `configured_layout`; PACT, groups or adapters with tensor parallelism;
            `Engine.compile` with `Data.reset_attention`, or without a C++ compiler; see also
            `require_float8`.
    """
    layout = configured_layout(model.config, recipe, workers.size)
    _require_supported(model, recipe, layout)
    if layout.mp > 1 and workers.device.type == "cuda" and not recipe.Engine.compile:
        log.warning(
            "Distributed.mp_degree %d without Engine.compile: the CPU takes milliseconds to start "
            "the kernels of a block, as a rule longer than a GPU takes to compute it",
            layout.mp,
        )
    length = recipe.Data.Train.dataset.max_seq_len
    sizes = stage_layers(model.config, length, layout.pp, layout.virtual_pp)
    count = len(sizes)
    # On the meta device nothing is allocated: each process cuts out its stages, divides their
    # tensors, and only then gets memory for its own parts (`build_stages`).
    skeleton = copy.deepcopy(model.to("meta"))
    if recipe.Engine.mix_precision.fp8:
        require_float8(skeleton, recipe, layout, workers.device)
        float8.insert(skeleton)
    skeleton.set_recompute(recipe.Model.recompute)
    stages = []
    for index in range(workers.at("pp"), count, layout.pp):
        # Tensor parallelism before FSDP, which shards what that leaves to this process.
        begin = sum(sizes[:index])
        part = _cut(skeleton, index, count, range(begin, begin + sizes[index]))
        stage = Stage(part, index, count, recipe, workers)
        if layout.mp > 1:
            _tensor_parallel(stage, workers.mesh["mp"])
        if recipe.Engine.compile:
            compile_blocks(part.blocks)
        # Weights that are not sharded are replicas, see `lathe.train.passes`.
        if layout.sharding > 1:
            _fully_shard(stage, recipe, workers)
        stages.append(stage)
    return stages


def _require_supported(model: GPT, recipe: Recipe, layout: Layout) -> None:
    """Raise UserError if the model or the recipe has what its layout cannot train."""
    if layout.mp > 1 and recipe.Compress.Quantization.activation_preprocess_type == "PACT":
        raise UserError(
            f"PACT cannot be trained with Distributed.mp_degree {layout.mp}",
            "leave Compress.Quantization.activation_preprocess_type empty, or use sharding",
            Code.LAYOUT,
        )
    if layout.mp > 1 and any(isinstance(module, LoraLinear) for module in model.modules()):
        raise UserError(
            f"Finetune.lora cannot be trained with Distributed.mp_degree {layout.mp}, which splits "
            "the linears that it adapts",
            "use dp_degree, sharding or pp_degree, or leave Finetune.lora.rank empty",
            Code.LAYOUT,
        )
    if recipe.Data.reset_attention and recipe.Engine.compile:
        raise UserError(
            "Data.reset_attention cannot be combined with Engine.compile: every batch has documents"
            " of other sizes, for which all blocks would be compiled again",
            "-o Engine.compile=False, or -o Data.reset_attention=False",
            Code.CONFLICTING_OPTIONS,
        )
    linears = [m for m in model.modules() if isinstance(m, FakeQuantLinear)]
    if layout.mp > 1 and any(
        linear.quantized.fmt.group_size or isinstance(linear.observer, RoundGroups)
        for linear in linears
    ):
        raise UserError(
            "scales of groups or of tokens (INT4, dynamic INT8) cannot be trained with "
            f"Distributed.mp_degree {layout.mp}, which splits what they are scales of",
            "use sharding, or Compress.Quantization.weight_bits=8 with "
            "activation_quantize_type=moving_average_abs_max",
            Code.LAYOUT,
        )


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile every block when it is first called.

    Raises:
        UserError: no C++ compiler, which torch builds kernels, or their launchers, with.
    """
    from torch._dynamo import config  # takes a second

    compilers = (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang")
    if not any(name and shutil.which(name) for name in compilers):
        raise UserError(
            "Engine.compile needs a C++ compiler, and there is none on PATH",
            "install one (apt-get install g++), name it in CXX, or -o Engine.compile=False",
            Code.NOT_INSTALLED,
        )
    # To torch the blocks are one function. It compiles at most 8 graphs of a function, fewer than
    # blocks of different widths need: one each for training, for evaluation, and for the last part
    # of a batch.
    limit = 4 * len(blocks)
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(explain_limit)
    # Else it traces through the table's cache and computes the table, on the CPU, in every layer.
    torch.compiler.assume_constant_result(rotary_table)  # type: ignore[no-untyped-call]
    for block in blocks:
        block.compile()


def explain_limit(record: logging.LogRecord) -> bool:
    """Say in our words what torch says where it compiles no further graphs of a function."""
    if not str(record.msg).startswith("torch._dynamo hit config."):
        return True
    log.warning(
        "torch.compile has compiled %s for as many shapes as it may; for further ones it runs "
        "uncompiled, which is slower. The layers' widths or the batches differ too much: train "
        "with -o Engine.compile=False, or prune to fewer different widths",
        record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else "a block",
    )
    return False


def _cut(skeleton: GPT, index: int, count: int, layers: range) -> GPT:
    """A copy with these layers, and the embedding or the head, of one stage; names stay those of
    the whole model."""
    part = copy.deepcopy(skeleton)
    blocks = nn.ModuleList()
    for i in layers:
        blocks.add_module(str(i), part.blocks[i])
    family, tables = part.config.architecture, part.config.tables
    setattr(part, family.blocks, blocks)
    at_first = {*family.embeddings, tables[0]}
    at_last = {family.final_norm, tables[-1]}
    if index < count - 1:
        part.head_input = None
    here = (at_first if index == 0 else set()) | (at_last if index == count - 1 else set())
    for name in (at_first | at_last) - here:
        delattr(part, name)
    return part


class _Column(ColwiseParallel):
    """Gathers its input and reduces the gradient of it in the dtype of the matmul, as Megatron-LM
    does: a norm's output is float32 under autocast, twice as many bytes.

    Fake quantization must round the same float32 values as a single process does.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[Placement, ...],
        desired_input_layouts: tuple[Placement, ...],
        mod: nn.Module,
        inputs: tuple[Tensor, ...],
        device_mesh: DeviceMesh,
    ) -> DTensor:
        x = inputs[0]
        if not isinstance(mod, FakeQuantLinear):
            x = x.to(compute_dtypes(x)[0])
        return ColwiseParallel._prepare_input_fn(  # type: ignore[no-any-return, no-untyped-call]
            input_layouts, desired_input_layouts, mod, (x,), device_mesh
        )


class _Table(RowwiseParallel):
    """Looks up the rows that a process has, and leaves zeros for the others to add to, so that its
    gradient is that of its rows (Shoeybi et al. 2019, section 3).

    torch 2.13 makes the gradient of the whole table in every process: for GPT-3's, 2.5 GB in
    float32.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Embedding)
        super()._apply(module, device_mesh)
        shape, placements = module.weight.shape, [Shard(0)]
        _, (first, _) = compute_local_shape_and_global_offset(shape, device_mesh, placements)

        def look_up(tokens: DTensor) -> DTensor:
            table = module.table()
            assert isinstance(table, DTensor)
            rows = table.to_local()
            ids = tokens.to_local() - first
            is_elsewhere = (ids < 0) | (ids >= len(rows))
            found = F.embedding(ids.masked_fill(is_elsewhere, 0), rows)
            found = found.masked_fill(is_elsewhere[..., None], 0)
            return DTensor.from_local(found, device_mesh, [Partial()])

        module.forward = look_up  # type: ignore[method-assign, assignment]
        return module


class _Replicated(ParallelStyle):
    """Replicates a module: every process computes all of it on the whole input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Tensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()])

        def local(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, whole, local)  # type: ignore[arg-type]


class _CacheScales(ParallelStyle):
    """Divides the scales of cached keys or values like the heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, CacheRounding):
            module.scale = distribute_tensor(module.scale, device_mesh, [Shard(0)])
        return module


def _tensor_parallel(stage: Stage, mesh: DeviceMesh) -> None:
    residual = Shard(1) if stage.sequence_parallel else Replicate()
    column = _Column(input_layouts=residual)
    row = RowwiseParallel(output_layouts=residual)
    table = _Table(input_layouts=Replicate(), output_layouts=residual)
    norm = SequenceParallel(use_local_output=True) if stage.sequence_parallel else _Replicated()
    head_sharding = SequenceParallel(sequence_dim=2, use_local_output=True)  # (B, T, G, n, D)
    config, family = stage.gpt.config, stage.gpt.config.architecture
    styles: dict[str, ParallelStyle] = {
        **dict.fromkeys((*family.embeddings, *config.tables), table),
        **dict.fromkeys((*family.block_norms, *family.output_norms, family.final_norm), norm),
        **dict.fromkeys(family.head_norms, head_sharding),
        **dict.fromkeys(("cached_key", "cached_value"), _CacheScales()),
        **{linear.name: column if linear.style == "column" else row for linear in family.linears},
    }
    plan = {
        name: style
        for name, _ in stage.gpt.named_modules()
        for ending, style in styles.items()
        if name == ending or (name.startswith(f"{family.blocks}.") and name.endswith(f".{ending}"))
    }
    # A style partitions all that is under its module; an observer is to stay as it is.
    linears = [m for m in stage.gpt.modules() if isinstance(m, FakeQuantLinear)]
    observers = [linear._modules.pop("observer") for linear in linears]
    parallelize_module(stage.gpt, mesh, plan)
    for linear, observer in zip(linears, observers, strict=True):
        linear.observer = observer  # type: ignore[assignment]


def _fully_shard(stage: Stage, recipe: Recipe, workers: Workers) -> None:
    precision, sharding = recipe.Engine.mix_precision, recipe.Distributed.sharding
    dims = ("dp", "sharding") if workers.mesh["dp"].size() > 1 else ("sharding",)
    offload = sharding.sharding_offload and workers.device.type == "cuda"
    dtype = stage.dtype if precision.is_pure else None
    shard = functools.partial(
        fully_shard,
        mesh=workers.mesh[dims],
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    # Block by block, so that a block's weights are gathered while the one before it computes. What
    # is left is the stage's own: its head is needed again as soon as the backward pass begins.
    for block in stage.gpt.blocks:
        shard(block, reshard_after_forward=sharding.sharding_stage == 3)
    shard(stage, reshard_after_forward=False)
