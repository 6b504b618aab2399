"""Finds the files of a checkpoint of Megatron-LM or Megatron-DeepSpeed.

A model is in several files: one for each tensor-parallel rank, and one for each pipeline rank or,
with DeepSpeed's pipelines, for each layer. The layouts, with T the tensor-parallel rank, P the
pipeline rank and L the layer:

    global_stepN/mp_rank_TT_model_states.pt            DeepSpeed without a pipeline
    global_stepN/layer_LL-model_TT-model_states.pt     DeepSpeed's PipelineModule
    iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt   Megatron-LM

Sources: megatron/checkpointing.py of Megatron-DeepSpeed at b4d4a0e; DeepSpeed,
runtime/engine.py and runtime/pipe/module.py.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import read_text

TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
LAYER = re.compile(r"layer_(\d{2,5})-model_(\d{2,4})-model_states\.pt")
MODULE = re.compile(r"mp_rank_(\d{2,4})_model_states\.pt")
FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?")
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
ZERO_3 = "zero_pp_rank_*_mp_rank_*_model_states.pt"
EXPERTS = "*expert_*_model_states.pt"
HINT = "give the folder global_stepN or iter_NNNNNNN, or the one that has it and names it in latest"
FEWER = "copy all parts of the checkpoint, those of every node"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint.

    Attributes:
        folder: that of one step.
        pieces: consecutive parts of the model, each with the files of its tensor-parallel ranks.
        metadata: the file with the flags of the training.
        is_by_layer: whether a piece is a layer, by DeepSpeed's names.
    """

    folder: Path
    pieces: list[tuple[Path, ...]]
    metadata: Path
    is_by_layer: bool = False


def find_files(source: Path) -> CheckpointFiles:
    """The files of the checkpoint `source`, or of the newest one that `source` names.

    Raises:
        UserError: no checkpoint, one in a format that is not supported, or missing files.
    """
    if not source.is_dir():
        what = "not a folder" if source.exists() else "no such folder"
        raise UserError(f"{printable(source)}: {what}", HINT, Code.NOT_FOUND)
    folder = _newest(source)
    names = sorted(path.name for path in folder.iterdir())
    if any(folder.glob(EXPERTS)):
        what = f"{folder}: has experts, but mixtures of experts are not supported"
        raise UserError(what, "give a dense GPT", Code.UNSUPPORTED)
    layers = {(int(m[1]), int(m[2])): folder / m[0] for n in names if (m := LAYER.fullmatch(n))}
    modules = {(0, int(m[1])): folder / m[0] for n in names if (m := MODULE.fullmatch(n))}
    if layers:
        if not modules:
            what = f"{folder}: no mp_rank_00_model_states.pt, which has the flags of the training"
            raise UserError(what, FEWER, Code.INCOMPLETE)
        return CheckpointFiles(folder, _pieces(folder, layers), modules[min(modules)], True)
    if modules:
        pieces = _pieces(folder, modules)
        return CheckpointFiles(folder, pieces, pieces[0][0])
    matches = [m for n in names if (m := FOLDER.fullmatch(n))]
    ranks = {(int(m[2] or 0), int(m[1])): _model_file(folder / m[0]) for m in matches}
    if ranks:
        pipeline = {rank for rank, _ in ranks}
        if missing := sorted(set(range(len(pipeline))) - pipeline):
            raise UserError(
                f"{folder}: pipeline rank {missing[0]} is missing", FEWER, Code.INCOMPLETE
            )
        pieces = _pieces(folder, ranks)
        return CheckpointFiles(folder, pieces, pieces[0][0])
    raise _unsupported(folder)


def _newest(source: Path) -> Path:
    """The folder of the step that the tracker in `source` names, or `source` itself."""
    for name in TRACKERS:
        tracker = source / name
        if not os.path.lexists(tracker):
            continue
        step = read_text(tracker, HINT, 100).strip()
        if not re.fullmatch(r"\w[\w.-]*", step):
            what = f"{tracker}: {printable(step, 60)!r} is not the name of a checkpoint"
            raise UserError(what, HINT, Code.MALFORMED)
        candidates = [f"global_step{step}", f"iter_{int(step):07d}"] if step.isdecimal() else [step]
        for candidate in candidates:
            if (source / candidate).is_dir():
                return source / candidate
        what = f"{tracker}: names {' or '.join(candidates)}, which does not exist"
        raise UserError(what, "copy that folder, or give another one", Code.NOT_FOUND)
    return source


def _pieces(folder: Path, files: Mapping[tuple[int, int], Path]) -> list[tuple[Path, ...]]:
    """The files by piece and tensor-parallel rank.

    Raises:
        UserError: the ranks of a piece have gaps, or pieces have different ranks.
    """
    by_piece: dict[int, dict[int, Path]] = {}
    for (piece, rank), path in sorted(files.items()):
        by_piece.setdefault(piece, {})[rank] = path
    count = 1 + max(rank for _, rank in files)
    for ranks in by_piece.values():
        for rank in range(count):
            if rank not in ranks:
                near = next(iter(ranks.values()))
                shown = near.relative_to(folder)
                what = f"{folder}: tensor-parallel rank {rank} of {count} is missing beside {shown}"
                raise UserError(what, FEWER, Code.INCOMPLETE)
    return [tuple(ranks[rank] for rank in range(count)) for ranks in by_piece.values()]


def _model_file(folder: Path) -> Path:
    for name in MEGATRON_FILES:
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder}: no {MEGATRON_FILES[0]}", FEWER, Code.INCOMPLETE)


def _unsupported(folder: Path) -> UserError:
    if any(folder.glob(ZERO_3)):
        return UserError(
            f"{folder}: ZeRO stage 3 has divided every weight among the data-parallel ranks",
            "save whole weights there: train a step with stage 2 or lower from this checkpoint, or "
            "with stage3_gather_16bit_weights_on_model_save",
            Code.UNSUPPORTED,
        )
    if any(folder.glob("*.distcp")):
        return UserError(
            f"{folder}: a distributed checkpoint of Megatron-Core",
            "convert it there first, with --ckpt-convert-format torch",
            Code.UNSUPPORTED,
        )
    return UserError(f"{folder}: no checkpoint of Megatron", HINT, Code.WRONG_KIND)
