"""Choose how to divide a training over GPUs: every layout that fits their memory, fastest first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from lathe.model.config import GPTConfig
from lathe.train.layout import Layout, configured_layout, global_batch, options, possible_layouts
from lathe.train.memory import Memory, estimate
from lathe.train.shape import model_config, trained_adapters
from lathe.train.speed import GPUS, Gpu, StepTime, bubble_share, data_sheet_flops, step_time
from lathe_base.config.recipe import shipped_recipes
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError, printable

USABLE = 0.9  # of a GPU's memory: the rest is for CUDA, NCCL's buffers and fragmentation
UNITS = {"m": 10**6, "g": 10**9, "t": 10**12, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MAX_GPU_BYTES = 2**50  # bytes of a GPU that anyone may mean
MAX_SUGGESTED_GPUS = 2**14  # that the answer to "how many, then?" may name


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimated memory per GPU and step time."""

    layout: Layout
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        gpus: number available; `best.layout.gpus` of them are used.
        batch: sequences per optimizer step, the same for all layouts.
        budget: bytes that a layout may use per GPU.
        fitting: the fastest of every (dp, mp, pp, sharding) that fits; the fastest of all first.
        own: the recipe's own layout, or why it cannot run.
    """

    gpus: int
    batch: int
    budget: float
    fitting: Sequence[Candidate]
    own: Candidate | UserError

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.fitting[0]

    def idle(self) -> str | None:
        """Why some of the GPUs are not used; None if all are."""
        used = self.best.layout.gpus
        if used == self.gpus:
            return None
        batch = max(1, round(self.batch / self.gpus)) * self.gpus
        return (
            f"{used} of {self.gpus}: a batch of {self.batch} sequences cannot be divided over "
            f"{self.gpus}; to use all, change the batch: -o Global.global_batch_size={batch} "
            "-o Global.local_batch_size=null"
        )

    def verdict(self) -> str:
        """Whether the recipe's own layout can run."""
        if isinstance(self.own, UserError):
            return f"cannot run: {self.own.what}"
        needs = f"{_gb(self.own.memory.total)} GB per GPU: {self.own.layout}"
        if self.own.memory.total > self.budget:
            return f"does not fit, {needs}"
        return (
            f"fits at {self.best.time.total / self.own.time.total:.0%} of the best speed, {needs}"
        )


def make_plan(
    recipe: Recipe,
    gpus: int,
    memory: float,
    gpus_per_node: int = 8,
    gpu: Gpu = GPUS["A100"],
) -> Plan:
    """Search the layouts that the trainer accepts on `gpus` GPUs of `memory` bytes.

    If the global batch cannot be divided over all of them, layouts of fewer GPUs are considered.

    Raises:
        UserError: no whole number of nodes, nothing fits, or the GPU has no units for the recipe's
            data type.
    """
    if gpus > 2**16:
        raise UserError(
            f"--gpus {gpus}: more than {2**16}", "give a smaller number", Code.INVALID_VALUE
        )
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise UserError(
            f"{gpus} GPUs are not a whole number of nodes of {gpus_per_node}",
            f"--gpus {-(-gpus // gpus_per_node) * gpus_per_node}, or another --gpus-per-node",
            Code.LAYOUT,
        )
    dtype = recipe.Engine.mix_precision.dtype
    if not data_sheet_flops(gpu.device, getattr(torch, dtype)):
        raise UserError(
            f"{gpu.device} has no {dtype}",
            "-o Engine.mix_precision.dtype=float16, or another --gpu",
            Code.UNSUPPORTED,
        )
    config = model_config(recipe, recipe.Prepare.vocab_size)
    batch, budget = global_batch(recipe, gpus), USABLE * memory
    lora = trained_adapters(recipe)  # which tensor parallelism cannot divide

    def candidate(layout: Layout) -> Candidate:
        time = step_time(config, recipe, layout, gpus_per_node, gpu)
        return Candidate(layout, estimate(config, recipe, layout, lora), time)

    def candidates_on(used: int) -> list[Candidate]:
        layouts = possible_layouts(config, recipe, batch, used, gpus_per_node)
        return [candidate(layout) for layout in layouts if lora is None or layout.mp == 1]

    # All layouts of all GPUs; if the batch cannot be divided over them, of any fewer.
    candidates = candidates_on(gpus)
    if not candidates:
        fewer = (
            *range(1, min(gpus, gpus_per_node + 1)),
            *range(2 * gpus_per_node, gpus, gpus_per_node),
        )
        candidates = [one for used in fewer for one in candidates_on(used)]
    # The fastest of each mesh that fits, the leaner of equals; the fastest of all first.
    fastest: dict[tuple[int, ...], Candidate] = {}
    for one in sorted(candidates, key=lambda c: (c.time.total, c.memory.total)):
        at = one.layout
        if one.memory.total <= budget:
            fastest.setdefault((at.dp, at.mp, at.pp, at.sharding), one)
    if not fastest:
        smallest = min(candidates, key=lambda c: c.memory.total)
        raise _too_large(smallest, config, recipe, batch, budget, gpus_per_node)
    requested: Candidate | UserError
    try:
        requested = candidate(configured_layout(config, recipe, gpus))
    except UserError as error:
        requested = error
    return Plan(gpus, batch, budget, list(fastest.values()), requested)


def require_fit(
    config: GPTConfig, recipe: Recipe, gpus: int, memory: float | None, gpus_per_node: int = 8
) -> None:
    """Check shapes, and whether every process fits its GPU, before any GPU is requested.

    Args:
        memory: bytes per GPU; None if unknown: then only shapes are checked.

    Raises:
        UserError: the model or the batch cannot be divided, or a process cannot fit; the hint has
            the options of the fastest layout that fits.
    """
    layout = configured_layout(config, recipe, gpus)
    needed = estimate(config, recipe, layout).total
    if memory is None or needed <= memory:
        return
    try:
        best = make_plan(recipe, gpus, memory, gpus_per_node).best.layout
        hint = f"use a layout that fits: {' '.join(f'-o {one}' for one in options(recipe, best))}"
    except UserError as error:
        hint = f"use {error.hint}"
    raise UserError(
        f"{layout}: needs {_gb(needed)} GB per GPU, which has {_gb(memory)} GB",
        f"start it anyway with --no-try, or {hint}",
        Code.OUT_OF_MEMORY,
    )


def precision_advice(recipe: Recipe, name: str, gpu: Gpu | None) -> str | None:
    """What to use on GPUs with bfloat16 instead of a recipe in float16, whose loss scale may skip
    updates.

    Args:
        name: of the recipe.
        gpu: None if it is not known.
    """
    has_bfloat16 = gpu is None or data_sheet_flops(gpu.device, torch.bfloat16) > 0
    if recipe.Engine.mix_precision.dtype != "float16" or not has_bfloat16:
        return None
    options = ["-o Engine.mix_precision.dtype=bfloat16"]
    if not recipe.Data.reset_attention and not recipe.Engine.compile:
        options.append("-o Engine.compile=True")
    better = " ".join(options)
    if f"{name}-bf16" in shipped_recipes():
        better = f"-r {name}-bf16, or {better}"
    where = "on A100, H100 and newer" if gpu is None else "this GPU has bfloat16"
    return f"float16, as V100 and T4 need; {where}: {better}"


def speed_estimate(plan: Plan, recipe: Recipe, gpu: Gpu) -> str:
    """The modeled speed of the best layout, in a line."""
    length, best = recipe.Data.Train.dataset.max_seq_len, plan.best
    tokens = plan.batch * length / best.time.total / best.layout.gpus
    config = model_config(recipe, recipe.Prepare.vocab_size)
    peak = data_sheet_flops(gpu.device, getattr(torch, recipe.Engine.mix_precision.dtype))
    mfu = f", {tokens * config.flops_per_token(length) / peak:.0%} MFU" if peak else ""
    return (
        f"{1e3 * best.time.total:,.0f} ms per step on {gpu.device}, {tokens:,.0f} tokens/s per GPU"
        f"{mfu} (modeled, not measured)"
    )


def parse_memory(text: str) -> float:
    """Bytes of `80GB`, `40GiB`, `24g`: G is 10^9, Gi is 2^30.

    Raises:
        UserError: not a size, or more than any GPU has.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([mgt]i?)b?\s*", text.lower())
    size = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < size <= MAX_GPU_BYTES:
        raise UserError(
            f"--memory {printable(text)}: not a size",
            "write it as 80GB, 24g or 40GiB",
            Code.INVALID_VALUE,
        )
    return size


def plan_table(plan: Plan, rows: int = 12) -> Table:
    """Table of the fastest layouts, the best one marked; about 120 columns wide."""
    table = Table(box=None, pad_edge=False)
    settings = ("", "dp", "mp", "pp", "sharding", "micro", "recompute")
    gigabytes = ("weights", "grads", "optim", "activ", "temp", "GB/GPU")
    for name in (*settings, *gigabytes, "bubble", "comm", "host", "again", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in plan.fitting[:rows]:
        at, memory, time = one.layout, one.memory, one.time
        is_best = one is plan.best
        shares = (x / time.total for x in (time.communication, time.host, time.recompute))
        split = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
        table.add_row(
            "*" if is_best else "",
            *(str(at.dp), f"{at.mp} sp" if at.sequence_parallel else str(at.mp)),
            f"{at.pp} x{at.virtual_pp}" if at.virtual_pp > 1 else str(at.pp),
            f"{at.sharding} stage {at.sharding_stage}" if at.sharding > 1 else "1",
            *(str(at.micro_batch), at.recompute or "no"),
            *(_gb(size) for size in (*split, memory.temporary, memory.total)),
            *(f"{share:.0%}" for share in (bubble_share(at), *shares)),
            f"{plan.best.time.total / time.total:.0%}",
            style="bold" if is_best else None,
        )
    return table


def _too_large(
    smallest: Candidate,
    config: GPTConfig,
    recipe: Recipe,
    batch: int,
    budget: float,
    gpus_per_node: int,
) -> UserError:
    layout, needed, lora = smallest.layout, smallest.memory.total, trained_adapters(recipe)

    def fits(gpus: int, recipe: Recipe) -> bool:
        layouts = possible_layouts(config, recipe, batch, gpus, gpus_per_node)
        return any(
            estimate(config, recipe, other, lora).total <= budget
            for other in layouts
            if lora is None or other.mp == 1
        )

    hints = [f"GPUs of {needed / USABLE / 1e9:.0f} GB"]
    gpus = 2 * layout.gpus
    while gpus <= MAX_SUGGESTED_GPUS and not fits(gpus, recipe):
        gpus *= 2
    if gpus <= MAX_SUGGESTED_GPUS:
        hints.insert(0, f"--gpus {gpus}")
    sharding = recipe.Distributed.sharding.model_copy(update={"sharding_offload": True})
    degrees = recipe.Distributed.model_copy(update={"sharding": sharding})
    if fits(layout.gpus, recipe.model_copy(update={"Distributed": degrees})):
        hints.append("-o Distributed.sharding.sharding_offload=True, which is slow")
    return UserError(
        f"no layout fits on {layout.gpus} GPUs with {_gb(budget)} GB each: the smallest needs "
        f"{_gb(needed)} GB ({layout})",
        ", or ".join(hints),
        Code.OUT_OF_MEMORY,
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 or not size else f"{size / 1e9:.2f}"
