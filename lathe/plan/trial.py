"""Tries a whole training on this machine, every distinct kind of its processes; and its results as
tables and JSON."""

import gc
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import numpy as np
import torch
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lathe.plan.host import small_recipe, time_host
from lathe.plan.order import find_mismatch
from lathe.plan.rank import RankTrial, make_job, try_rank
from lathe.plan.record import Collective
from lathe.plan.repeat import is_unsteady
from lathe.train.layout import DIMS, Layout, configured_layout
from lathe.train.memory import Memory, estimate
from lathe.train.shape import trained_adapters
from lathe.train.speed import launch_seconds, volume
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.progress import bar
from lathe_launch.parent import die_with_parent

T = TypeVar("T")

MAX_EXHAUSTIVE_RANKS = 4
"""Number of processes up to which all are tried, not only the distinct ones."""

STEP = ("forward and backward", "update", "after the step")
"""The phases of an optimizer step."""

PLANNED = ("weights", "gradients", "optimizer", "activations", "temporary")
KINDS = (*PLANNED[:4], "logits", "buffers", "temporary")
"""The planner's kinds of memory, and a trial's: it has logits and the buffers of collectives, some
of which are gathered weights, apart."""


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective in one kind of group during a step of one process.

    Attributes:
        dims: the mesh's dimensions along which the group extends.
        bytes: sum of the payloads.
    """

    kind: str
    dims: tuple[str, ...]
    calls: float
    bytes: float


@dataclass(frozen=True)
class ProcessTrial:
    """Requirements of one step of one process.

    Attributes:
        at: coordinate in each of `lathe.train.layout.DIMS`.
        memory: bytes by category at the fullest moment.
        flops: floating-point operations of a step.
        operations: number of those of torch that start a kernel in a step.
    """

    rank: int
    at: Mapping[str, int]
    memory: Mapping[str, float]
    flops: float
    operations: float
    traffic: Sequence[Traffic]

    @property
    def peak(self) -> float:
        """Total bytes."""
        return sum(self.memory.values())

    @property
    def volume(self) -> dict[str, float]:
        """Bytes by dimension, counted as in `lathe.train.speed.volume`."""
        volumes: dict[str, float] = {}
        for one in self.traffic:
            along, times = " x ".join(one.dims), 2 if one.kind == "all_reduce" else 1
            if one.kind != "recv":  # the other end of a send
                volumes[along] = volumes.get(along, 0.0) + times * one.bytes
        return volumes


@dataclass(frozen=True)
class TrainingTrial:
    """
    Attributes:
        ranks: the processes that were tried, by rank.
        estimate: the planner's, of its fullest process.
        model_flops: operations of a step, by the formula that MFU is computed with.
        volume: the planner's bytes of a step along each dimension; see `lathe.train.speed.volume`.
        host: seconds of a CPU thread in an eager step of the first process, as measured with small
            tensors (`lathe.plan.host`), and by the planner.
        mismatch: why the processes could not run together; None if they can.
        seconds: that the trial took.
    """

    layout: Layout
    ranks: Sequence[ProcessTrial]
    estimate: Memory
    model_flops: float
    volume: Mapping[str, float]
    host: tuple[float, float]
    mismatch: str | None
    seconds: float

    @property
    def fullest(self) -> ProcessTrial:
        """The process that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def flops(self) -> float:
        """FLOPs of a step over all processes; the processes of one stage compute the same."""
        by_stage = {rank.at["pp"]: rank.flops for rank in self.ranks}
        return sum(by_stage.values()) * self.layout.gpus / self.layout.pp


def try_training(recipe: Recipe, gpus: int, on_gpu: bool = True) -> TrainingTrial:
    """Try the recipe's own layout on `gpus` processes.

    A step of many micro-batches is extrapolated from two short ones: their difference is the cost
    of each further micro-batch.

    Args:
        on_gpu: whether to choose a GPU's kernels; else those of a CPU.

    Raises:
        UserError: the model or the batch cannot be divided as the recipe asks.
    """
    started = time.monotonic()
    # Some processes for a few micro-batches stand for all: see `tried_ranks` and `short_steps`.
    config = make_job(recipe).model.config
    layout = configured_layout(config, recipe, gpus)
    ranks = list(tried_ranks(layout))
    steps = short_steps(layout)
    runs = {n: try_ranks(_shortened_recipe(recipe, layout, n), ranks, gpus, on_gpu) for n in steps}
    last = runs[steps[-1]]
    host = _host_seconds(recipe, layout)
    tokens = layout.data_parallel * layout.micro_batch * layout.accumulate_steps
    tokens *= recipe.Data.Train.dataset.max_seq_len
    return TrainingTrial(
        layout=layout,
        ranks=[_extended({n: runs[n][i] for n in steps}, layout) for i in range(len(ranks))],
        estimate=estimate(config, recipe, layout, trained_adapters(recipe)),
        model_flops=config.flops_per_token(recipe.Data.Train.dataset.max_seq_len) * tokens,
        volume=volume(config, recipe, layout),
        host=(host, launch_seconds(config, recipe, layout, is_compiled=False)),
        mismatch=find_mismatch({r.rank: r.collectives for r in last}) or _unsaved(last, gpus),
        seconds=time.monotonic() - started,
    )


def tried_ranks(layout: Layout) -> Iterator[int]:
    """All processes if they are few; otherwise the distinct ones: every stage of the pipeline, and
    at its first, middle and last stage the last process of every other dimension."""
    # Ranks are numbered in the order of the mesh's dimensions, the last one fastest.
    sizes = {"pp": layout.pp, "dp": layout.dp, "sharding": layout.sharding, "mp": layout.mp}
    if layout.gpus <= MAX_EXHAUSTIVE_RANKS:
        yield from range(layout.gpus)
        return
    coordinates = {(stage, 0, 0, 0) for stage in range(layout.pp)}
    for stage, dim in product({0, layout.pp // 2, layout.pp - 1}, DIMS[1:]):
        coordinates.add((stage, *(sizes[d] - 1 if d == dim else 0 for d in DIMS[1:])))
    for coordinate in sorted(coordinates):
        yield int(np.ravel_multi_index(coordinate, [sizes[dim] for dim in DIMS]))


def short_steps(layout: Layout) -> list[int]:
    """Numbers of micro-batches of the steps to try: the layout's own, or two shorter ones that fill
    the pipeline and have a first, a middle and a last micro-batch."""
    # Interleaved schedules need multiples of the pipeline's length.
    unit = layout.pp if layout.virtual_pp > 1 else 1
    first = 2 * layout.pp if layout.virtual_pp > 1 else layout.pp + 2
    steps = [first, first + unit]
    return steps if steps[-1] < layout.accumulate_steps else [layout.accumulate_steps]


def _shortened_recipe(recipe: Recipe, layout: Layout, steps: int) -> Recipe:
    """Steps of so many micro-batches, with little validation."""
    local = layout.micro_batch * steps
    sizes = {
        "global_batch_size": local * layout.data_parallel,
        "local_batch_size": local,
        "micro_batch_size": layout.micro_batch,
    }
    engine = {"max_steps": 2, "eval_iters": 1, "accumulate_steps": None, "compile": False}
    halves = {"split": [1.0, 1.0, 0.0]}  # of the two documents that a trial has

    def part(settings: Any) -> Any:
        return settings.model_copy(update={"dataset": settings.dataset.model_copy(update=halves)})

    data = {"Train": part(recipe.Data.Train), "Eval": part(recipe.Data.Eval)}
    return recipe.model_copy(
        update={
            "Global": recipe.Global.model_copy(update=sizes),
            "Engine": recipe.Engine.model_copy(update=engine),
            "Data": recipe.Data.model_copy(update=data),
        }
    )


def _host_seconds(recipe: Recipe, layout: Layout) -> float:
    """Measured seconds of the host in a step of the first process."""
    # Two shorter steps as in `try_training`, but far enough apart that their difference is exact.
    first = short_steps(layout)[0]
    steps = [first, 3 * first] if 3 * first < layout.accumulate_steps else [layout.accumulate_steps]
    single, work = replace(layout, micro_batch=1), dict[str, Callable[[], float]]()
    for n in steps:
        small = small_recipe(_shortened_recipe(recipe, single, n))
        work[f"a step of {n} micro-batches"] = partial(time_host, small, 0, layout.gpus)
    seconds = run_apart(work)
    if len(seconds) == 1:
        return seconds[0]
    each = (seconds[1] - seconds[0]) / (steps[1] - steps[0])
    return seconds[0] + each * (layout.accumulate_steps - steps[0])


def try_ranks(recipe: Recipe, ranks: Sequence[int], size: int, on_gpu: bool) -> list[RankTrial]:
    """Try each in a separate process."""
    return run_apart({f"rank {r}": partial(_try_rank, recipe, r, size, on_gpu) for r in ranks})


def _try_rank(recipe: Recipe, rank: int, size: int, on_gpu: bool) -> RankTrial:
    try:
        return try_rank(recipe, make_job(recipe), rank, size, on_gpu)
    except Exception as error:
        if not is_unsteady(error):
            raise
        return try_rank(recipe, make_job(recipe), rank, size, on_gpu, repeats=False)


def run_apart(work: Mapping[str, Callable[[], T]]) -> list[T]:
    """Run each function in a fork of this process, because DTensor caches properties of a mesh, and
    return their results.

    Args:
        work: by a name, for errors.
    """
    context, waiting = get_context("fork"), list(work)
    running: dict[Any, tuple[str, ForkProcess]] = {}
    results: dict[str, T] = {}
    try:
        with bar("process", len(work)) as progress:
            while waiting or running:
                # One process for each core: fake tensors compute on one thread.
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    name, (end, other) = waiting.pop(0), context.Pipe(duplex=False)
                    process = context.Process(target=_child, args=(other, work[name]))
                    process.start()
                    other.close()  # or this end would never see the other's end
                    running[end] = name, process
                for ready in wait(list(running)):
                    name, process = running[ready]
                    results[name] = _received(ready, name)
                    process.join()
                    del running[ready]
                    progress.advance()
    finally:
        for _, process in running.values():
            process.kill()
    return [results[name] for name in work]


def _child(end: Connection, function: Callable[[], Any]) -> None:
    die_with_parent()
    gc.freeze()  # or a process group of the parent is collected here, and waits for its threads
    torch.set_num_threads(1)
    sys.stderr = io.StringIO()  # no bar or warnings of a step that is not meant to be trained
    try:
        end.send((function(),))
    except UserError as error:
        end.send((error.what, error.hint, error.code))
    except Exception:
        end.send(traceback.format_exc())


def _received(end: Any, name: str) -> Any:
    try:
        result = end.recv()
    except EOFError:
        raise StageError(
            f"the trial of {name} was killed: probably out of memory", Code.KILLED
        ) from None
    # A process sends its result, the parts of a user error, or the traceback of a bug.
    if isinstance(result, str):
        raise RuntimeError(f"the trial of {name} failed:\n{result}")
    if len(result) > 1:
        raise UserError(*result)
    return result[0]


def _extended(runs: Mapping[int, RankTrial], layout: Layout) -> ProcessTrial:
    """A process with all micro-batches of its layout.

    Args:
        runs: of one or two numbers of micro-batches.
    """
    first, last = min(runs), max(runs)
    short, long = runs[first], runs[last]
    # Linear in the number of micro-batches, so two points determine it. `units` is how many times
    # the difference of both runs is missing.
    units = (layout.accumulate_steps - first) / (last - first) if last > first else 0.0

    def at(measure: Callable[[RankTrial], Mapping[Any, float]]) -> dict[Any, float]:
        before, after = measure(short), measure(long)
        return {
            key: before.get(key, 0) + units * (after.get(key, 0) - before.get(key, 0))
            for key in {**before, **after}
        }

    calls = at(lambda run: _calls(run, layout, lambda call: 1))
    sizes = at(lambda run: _calls(run, layout, lambda call: call.bytes))
    return ProcessTrial(
        rank=short.rank,
        at=short.at,
        memory=at(lambda run: run.memory),
        flops=sum(at(lambda run: {p: run.flops.get(p, 0) for p in STEP}).values()),
        operations=sum(at(lambda run: {p: run.operations.get(p, 0) for p in STEP}).values()),
        traffic=[
            Traffic(kind, dims, calls[kind, dims], sizes[kind, dims])
            for kind, dims in sorted(calls)
        ],
    )


def _calls(
    run: RankTrial, layout: Layout, measure: Callable[[Collective], float]
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sums of a step's collectives among several processes, by kind and by the dimensions of the
    mesh along which the processes differ."""
    sizes = [layout.pp, layout.dp, layout.sharding, layout.mp]
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for call in run.collectives:
        if call.phase in STEP and len(call.ranks) > 1:
            coordinates = np.array(np.unravel_index(list(call.ranks), sizes))  # (dimensions, ranks)
            differs = (coordinates != coordinates[:, :1]).any(1)
            key = call.kind, tuple(dim for dim, one in zip(DIMS, differs, strict=True) if one)
            totals[key] = totals.get(key, 0) + measure(call)
    return totals


def _unsaved(runs: Sequence[RankTrial], gpus: int) -> str | None:
    """Why the processes' parts do not make up a complete saved state; unknown unless all ran."""
    if len(runs) < gpus:
        return None
    try:
        DefaultSavePlanner(flatten_state_dict=False).create_global_plan([r.saved for r in runs])
    except ValueError as error:
        return f"the parts of a saved state do not fit together: {error}"
    return None


def memory_table(trial: TrainingTrial, size: float) -> Table:
    """Table of the memory of every process that was tried, and of the planner's estimate.

    Args:
        size: bytes of a GPU.
    """
    table = Table(box=None, pad_edge=False)
    for name in ("rank", *trial.ranks[0].at, *KINDS, "GB", "of the GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in trial.ranks:
        is_fullest = rank is trial.fullest
        split = (_gb(rank.memory.get(kind, 0.0)) for kind in KINDS)
        ranks = map(str, (rank.rank, *rank.at.values()))
        share = f"{rank.peak / size:.0%}"
        style = "bold" if is_fullest else None
        table.add_row(*ranks, *split, _gb(rank.peak), share, style=style)
    planned = trial.estimate
    split = (_gb(getattr(planned, kind)) if kind in PLANNED else "" for kind in KINDS)
    blank = [""] * len(trial.ranks[0].at)
    table.add_row("plan", *blank, *split, _gb(planned.total), f"{planned.total / size:.0%}")
    return table


def traffic_table(rank: ProcessTrial) -> Table:
    """Table of the collectives of a process in a step."""
    table = Table(box=None, pad_edge=False)
    for name in ("collective", "along"):
        table.add_column(name)
    for name in ("calls", "GB per step"):
        table.add_column(name, justify="right")
    for one in rank.traffic:
        table.add_row(one.kind, " x ".join(one.dims), f"{one.calls:,.0f}", _gb(one.bytes))
    return table


def step_table(trial: TrainingTrial) -> Table:
    """Table of what the first process's CPU does in a step, and of the planner's estimate."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"per step of rank {trial.ranks[0].rank}")
    for name in ("tried", "plan"):
        table.add_column(name, justify="right")
    table.add_row("operations", f"{trial.ranks[0].operations:,.0f}")
    table.add_row("host, ms, eager", *(f"{1e3 * seconds:,.1f}" for seconds in trial.host))
    return table


def figures(trial: TrainingTrial) -> dict[str, str]:
    """Other results of a trial, shown in one line each."""
    moved = trial.fullest.volume
    exchanged = (
        f"{dim} {_gb(moved.get(dim, 0.0))} (plan {_gb(size)})" for dim, size in trial.volume.items()
    )
    return {
        "FLOPs per step": (
            f"{trial.flops:.3e}, {trial.flops / trial.model_flops:.3f} x MFU's formula"
        ),
        "exchanged": f"GB per step: {', '.join(exchanged) or 'none'}",
        "collectives": trial.mismatch or "in the same order on all processes that were tried",
        "tried": f"{len(trial.ranks)} of {trial.layout.gpus} processes in {trial.seconds:.0f} s",
    }


def as_json(trial: TrainingTrial, size: float) -> dict[str, Any]:
    """The whole trial, in bytes, operations and seconds."""
    return {
        "layout": asdict(trial.layout),
        "gpu_bytes": size,
        "ranks": [
            {
                "rank": rank.rank,
                "at": dict(rank.at),
                "bytes": {**rank.memory, "total": rank.peak},
                "flops_per_step": rank.flops,
                "operations_per_step": rank.operations,
                "volume": rank.volume,
                "collectives": [asdict(one) for one in rank.traffic],
            }
            for rank in trial.ranks
        ],
        "planned_bytes": {**asdict(trial.estimate), "total": trial.estimate.total},
        "planned_volume": dict(trial.volume),
        "host_seconds_per_step": trial.host[0],
        "planned_host_seconds_per_step": trial.host[1],
        "flops_per_step": trial.flops,
        "model_flops_per_step": trial.model_flops,
        "mismatch": trial.mismatch,
        "seconds": trial.seconds,
    }


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
