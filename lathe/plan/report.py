"""Results of a trial, as tables and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from lathe.plan.trial import ProcessTrial, TrainingTrial

PLANNED = ("weights", "gradients", "optimizer", "activations", "temporary")
KINDS = (*PLANNED[:4], "logits", "buffers", "temporary")
"""The planner's kinds of memory, and a trial's: it has logits and the buffers of collectives, some
of which are gathered weights, apart."""


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
        "ranks": [_rank(rank) for rank in trial.ranks],
        "planned_bytes": {**asdict(trial.estimate), "total": trial.estimate.total},
        "planned_volume": dict(trial.volume),
        "flops_per_step": trial.flops,
        "model_flops_per_step": trial.model_flops,
        "mismatch": trial.mismatch,
        "seconds": trial.seconds,
    }


def _rank(rank: ProcessTrial) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "at": dict(rank.at),
        "bytes": {**rank.memory, "total": rank.peak},
        "flops_per_step": rank.flops,
        "volume": rank.volume,
        "collectives": [asdict(one) for one in rank.traffic],
    }


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
