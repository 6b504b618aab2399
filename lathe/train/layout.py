"""Parallel layouts of a training: the recipe's own, and all candidates worth considering."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from lathe.model.config import GPTConfig
from lathe.train.batches import resolve_batch
from lathe_base.config.settings import DistributedSettings, Recipe
from lathe_base.config.settings.types import Recompute, ShardingStage
from lathe_base.errors import Code, UserError

DIMS = ("pp", "dp", "sharding", "mp")
"""Mesh dimensions, heaviest communication innermost (last), so that those ranks share a node."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout, and the micro-batch size."""

    dp: int
    mp: int
    pp: int
    sharding: int
    sharding_stage: ShardingStage
    micro_batch: int
    accumulate_steps: int
    virtual_pp: int
    recompute: Recompute | None
    sequence_parallel: bool

    def __str__(self) -> str:
        parts = [f"dp {self.dp}", f"mp {self.mp}", f"pp {self.pp}"]
        if self.virtual_pp > 1:
            parts.append(f"virtual pp {self.virtual_pp}")
        if self.sharding > 1:
            parts.append(f"sharding {self.sharding} stage {self.sharding_stage}")
        parts.append(f"micro batch {self.micro_batch}")
        parts.append(f"recompute {self.recompute}" if self.recompute else "no recompute")
        return ", ".join(parts + ["sequence parallel"] * self.sequence_parallel)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return self.dp * self.sharding

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data_parallel * self.mp * self.pp

    def layers(self, rank: int, config: GPTConfig, length: int) -> int:
        """Layers of the `rank`-th GPU of a pipeline, in `virtual_pp` stages."""
        sizes = stage_layers(config, length, self.pp, self.virtual_pp)
        return sum(sizes[rank :: self.pp])


def head_layers(config: GPTConfig, length: int) -> float:
    """FLOPs of the head, in those of a layer; of the mean layer if they differ."""
    head = 6.0 * config.vocab_size * config.n_embd
    return head * config.n_layer / (config.flops_per_token(length) - head)


def stage_layers(config: GPTConfig, length: int, pp: int, virtual_pp: int) -> tuple[int, ...]:
    """Number of layers in each stage of a pipeline, first to last.

    The last stage also has the head. It gets fewer layers than the others if the GPU with the most
    FLOPs then has less to compute; otherwise all stages get the same number, as far as possible.
    Depends on nothing but the model's shape, the length of sequences and the number of stages, so
    that a run resumes with the stages that it has had.
    """
    return _balanced(config.n_layer, head_layers(config, length), pp, virtual_pp)


@cache
def _balanced(n_layer: int, head: float, pp: int, virtual_pp: int) -> tuple[int, ...]:
    count = pp * virtual_pp
    even = tuple((i + 1) * n_layer // count - i * n_layer // count for i in range(count))
    splits = [even]
    for last in range(even[-1], 0, -1) if count > 1 else ():
        each, more = divmod(n_layer - last, count - 1)
        # The larger stages come last: the first ones keep the most activations.
        splits.append((each,) * (count - 1 - more) + (each + 1,) * more + (last,))

    def most(sizes: tuple[int, ...]) -> float:
        loads = [float(sum(sizes[rank::pp])) for rank in range(pp)]
        loads[-1] += head
        return max(loads)

    return min(splits, key=most)  # of equals the first, which moves the fewest layers


def mesh_shape(settings: DistributedSettings, size: int) -> tuple[int, int, int, int]:
    """Degrees in the order of `DIMS` that multiply to `size`; `dp_degree: auto` becomes the
    quotient.

    Raises:
        UserError: there are none.
    """
    pp, mp, sharding = settings.pp_degree, settings.mp_degree, settings.sharding.sharding_degree
    inner = pp * mp * sharding
    dp = max(1, size // inner) if settings.dp_degree == "auto" else settings.dp_degree
    if dp * inner != size:
        raise UserError(
            f"Distributed asks for {dp} (dp) * {mp} (mp) * {pp} (pp) * {sharding} (sharding) = "
            f"{dp * inner} processes, but there are {size}",
            f"start {dp * inner} processes, or choose degrees that multiply to {size}",
            Code.LAYOUT,
        )
    return pp, dp, sharding, mp


def configured_layout(config: GPTConfig, recipe: Recipe, gpus: int) -> Layout:
    """The recipe's layout on this many processes.

    Raises:
        UserError: heads, widths, vocabulary, layers or batch are not divisible by its degrees.
    """
    layout = wanted_layout(recipe, gpus)
    _check(config, recipe, layout)
    return layout


def wanted_layout(recipe: Recipe, gpus: int) -> Layout:
    """Like `configured_layout`, without checking the model's shape.

    Raises:
        UserError: the batch or the number of processes is not divisible by the degrees.
    """
    pp, dp, sharding, mp = mesh_shape(recipe.Distributed, gpus)
    batch = resolve_batch(recipe, dp * sharding)
    return Layout(
        dp=dp,
        mp=mp,
        pp=pp,
        sharding=sharding,
        sharding_stage=recipe.Distributed.sharding.sharding_stage,
        micro_batch=batch.micro,
        accumulate_steps=batch.accumulate_steps,
        virtual_pp=recipe.Model.virtual_pp_degree,
        recompute=recipe.Model.recompute,
        sequence_parallel=recipe.Model.sequence_parallel and mp > 1,
    )


def global_batch(recipe: Recipe, gpus: int) -> int:
    """The recipe's global batch size in sequences. It affects the result of training, so no layout
    may change it."""
    if recipe.Global.global_batch_size is not None:
        return recipe.Global.global_batch_size
    # Like `mesh_shape`, but degrees need not multiply to `gpus`: the layout is yet to be chosen.
    degrees = recipe.Distributed
    inner = degrees.mp_degree * degrees.pp_degree * degrees.sharding.sharding_degree
    dp = max(1, gpus // inner) if degrees.dp_degree == "auto" else degrees.dp_degree
    return resolve_batch(recipe, dp * degrees.sharding.sharding_degree).total


def possible_layouts(
    config: GPTConfig, recipe: Recipe, batch: int, gpus: int, gpus_per_node: int
) -> Iterator[Layout]:
    """Candidate layouts that the trainer accepts, for a global batch of `batch` sequences.

    Tensor parallelism always includes sequence parallelism, which only saves memory. core_attn is
    left out: with a fused attention kernel there are no scores to recompute.
    """
    seq_len = recipe.Data.Train.dataset.max_seq_len
    recomputes: tuple[Recompute | None, ...] = (None, "full_attn", "full")
    for mp, pp, dp, sharding in _meshes(config, gpus, gpus_per_node):
        if batch % (dp * sharding):
            continue
        local = batch // (dp * sharding)
        rounds = (1, 2, 4) if pp > 1 else (1,)
        for micro, virtual, recompute in product(_divisors(local), rounds, recomputes):
            # Sharding stages that make a difference: a pipeline keeps whole weights and gradients
            # until the end of a step, and with a single micro-batch stage 2 is stage 1.
            stages: tuple[ShardingStage, ...] = (1,)
            if sharding > 1 and pp == 1:
                stages = (1, 2, 3) if local // micro > 1 else (1, 3)
            for stage in stages:
                layout = Layout(
                    dp=dp,
                    mp=mp,
                    pp=pp,
                    sharding=sharding,
                    sharding_stage=stage,
                    micro_batch=micro,
                    accumulate_steps=local // micro,
                    virtual_pp=virtual,
                    recompute=recompute,
                    sequence_parallel=mp > 1 and seq_len % mp == 0,
                )
                try:
                    _check(config, recipe, layout)
                except UserError:
                    continue
                yield layout


def options(recipe: Recipe, layout: Layout) -> list[str]:
    """The overrides, `Group.key=value`, that turn the recipe's layout into this one."""
    model, sizes, degrees = recipe.Model, recipe.Global, recipe.Distributed
    sharding = degrees.sharding
    wanted: list[tuple[str, Any, Any]] = [
        ("Distributed.dp_degree", degrees.dp_degree, layout.dp),
        ("Distributed.mp_degree", degrees.mp_degree, layout.mp),
        ("Distributed.pp_degree", degrees.pp_degree, layout.pp),
        ("Distributed.sharding.sharding_degree", sharding.sharding_degree, layout.sharding),
        ("Distributed.sharding.sharding_stage", sharding.sharding_stage, layout.sharding_stage),
        ("Global.micro_batch_size", sizes.micro_batch_size, layout.micro_batch),
        ("Model.use_recompute", model.recompute is not None, layout.recompute is not None),
        ("Model.virtual_pp_degree", model.virtual_pp_degree, layout.virtual_pp),
    ]
    if sizes.global_batch_size is None or sizes.local_batch_size is not None:
        local = layout.micro_batch * layout.accumulate_steps
        wanted.append(("Global.local_batch_size", sizes.local_batch_size, local))
    steps = recipe.Engine.accumulate_steps
    if steps is not None:
        wanted.append(("Engine.accumulate_steps", steps, layout.accumulate_steps))
    if layout.recompute is not None:
        granularity = model.recompute_granularity or "full"
        wanted.append(("Model.recompute_granularity", granularity, layout.recompute))
    if layout.mp > 1:
        is_parallel = layout.sequence_parallel
        wanted.append(("Model.sequence_parallel", model.sequence_parallel, is_parallel))
    return [f"{key}={new}" for key, old, new in wanted if old not in (new, "auto")]


def _meshes(
    config: GPTConfig, gpus: int, gpus_per_node: int
) -> Iterator[tuple[int, int, int, int]]:
    """(mp, pp, dp, sharding): tensor parallelism stays within a node, stages have the same number
    of layers, and sharding is none, within a node, or over all replicas."""
    for mp in _divisors(min(gpus, gpus_per_node)):
        for pp in _divisors(gpus // mp):
            replicas, in_node = gpus // (mp * pp), gpus_per_node // mp
            if config.n_layer % pp == 0:
                for sharding in sorted({1, math.gcd(replicas, in_node), replicas}):
                    yield mp, pp, replicas // sharding, sharding


def _check(config: GPTConfig, recipe: Recipe, layout: Layout) -> None:
    """Raise UserError if a size is not divisible by its degree."""
    stages, steps = layout.pp * layout.virtual_pp, layout.accumulate_steps
    if stages > config.n_layer:
        raise UserError(
            f"{config.n_layer} layers cannot be split into {stages} pipeline stages",
            "lower Distributed.pp_degree or Model.virtual_pp_degree",
            Code.LAYOUT,
        )
    if steps < layout.pp or (layout.virtual_pp > 1 and steps % layout.pp):
        raise UserError(
            f"{steps} micro-batches per step cannot keep {layout.pp} pipeline stages busy",
            f"make Global.local_batch_size / micro_batch_size a multiple of {layout.pp}",
            Code.LAYOUT,
        )
    if layout.virtual_pp > 1 and layout.pp == 1:
        raise UserError(
            f"Model.virtual_pp_degree {layout.virtual_pp} without a pipeline",
            "raise Distributed.pp_degree, or leave virtual_pp_degree at 1",
            Code.LAYOUT,
        )
    if config.architecture.norms_whole and layout.mp > 1:
        raise UserError(
            f"{config.architecture.title} normalizes the queries of all heads together, which "
            f"cannot be split by Distributed.mp_degree {layout.mp}",
            "set Distributed.mp_degree=1, and use sharding",
            Code.LAYOUT,
        )
    sizes = {
        "key-value heads" if config.kv_heads else "attention heads": config.n_kv_head,
        "FFN channels": config.n_inner,
        "ids of vocabulary": [config.vocab_size],
        "positions": [config.n_position_rows] if config.rope is None else [],
        "tokens of a sequence": [recipe.Data.Train.dataset.max_seq_len],
    }
    if not layout.sequence_parallel:
        del sizes["tokens of a sequence"]
    # What tensor parallelism divides, in every layer.
    for what, values in sizes.items():
        for value in values:
            if value % layout.mp:
                raise UserError(
                    f"{value} {what} cannot be divided by Distributed.mp_degree {layout.mp}",
                    "choose a degree that divides it, or another size in Model or Data",
                    Code.LAYOUT,
                )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
