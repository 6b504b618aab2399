"""Converts PaddleFleetX's GPT checkpoints to and from checkpoint folders, without Paddle or torch.

A PaddleFleetX checkpoint is `mp_00_sharding_00_pp_00/model.pdparams`, with linears (in, out) as in
HF's files, a fused qkv ordered head by head, and its own names. Source: PaddleFleetX release 2.4,
`ppfleetx/models/language_model/gpt/dygraph/single_model.py`.

A run on several cards writes `mp_XX_sharding_XX_pp_XX/model.pdparams`: each tensor-parallel rank
(mp) its slice of the split tensors, each pipeline stage (pp) its layers, each sharding rank the
whole of both, because every stage of sharding gathers parameters before it saves them. Source:
`ppfleetx/core/engine/eager_engine.py`, `save`.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from lathe.backends.paddle_names import (
    QUANTIZERS,
    WEIGHT_RANGE,
    Arrays,
    by_head,
    by_projection,
    their_name,
    to_lathe_names,
)
from lathe.backends.pdparams import load_pdparams, read_pdparams, write_pdparams
from lathe.data.tars import files_in_tar, is_tar
from lathe.data.tokenizer import load_tokenizer, tokenizer_files
from lathe.model.config import GPTConfig, require_gpt2
from lathe.model.families import GPT2
from lathe.model.folder import (
    WEIGHTS,
    drop_tied_head,
    non_finite,
    open_folder,
    read_tensors,
    require_fit,
    require_size,
    require_vocabulary,
    write_imported,
)
from lathe.model.quantization import (
    ACTIVATION_LEVELS,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)
from lathe_base.artifacts.kinds import CHECKPOINT, PADDLE_CHECKPOINT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

FILE = "model.pdparams"
ENDING = ".pdparams"
PART = "mp_00_sharding_00_pp_00"
RANK = re.compile(r"mp_(\d+)_sharding_(\d+)_pp_(\d+)")
COPY = "copy the whole checkpoint again"
SPLIT = {
    **{x.name: 1 for x in GPT2.linears if x.style == "column"},
    **{x.name: 0 for x in GPT2.linears if x.style == "row"},
}
"""Linear -> the axis of its weight (in, out) that tensor parallelism splits."""


class Rank(NamedTuple):
    """A process of a run, by its place in every kind of parallelism."""

    mp: int = 0
    sharding: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"mp_{self.mp:02}_sharding_{self.sharding:02}_pp_{self.pp:02}"

    @classmethod
    def of(cls, folder: str) -> "Rank | None":
        """The rank that a folder is named after, if any."""
        match = RANK.fullmatch(folder)
        return cls(*map(int, match.groups())) if match else None


def import_checkpoint(
    recipe: Recipe, source: Path, tokenizer: Path | None, output: Path
) -> GPTConfig:
    """Write a checkpoint folder from PaddleFleetX's GPT; float16 becomes float32.

    A model that PaddleSlim has fake-quantized keeps its float weights, and the ranges of its inputs
    become the checkpoint's quantization plan.

    Args:
        recipe: gives `Model.num_attention_heads`, which cannot be derived from the tensors.
        source: `model.pdparams`, with or without its extension; a folder or tar archive that
            contains it, or the parts of several ranks.
        tokenizer: `tokenizer.json`, or a folder with GPT-2's BPE; by default that beside the model.

    Raises:
        UserError: no or more than one model, missing or contradicting parts, names or shapes that
            are not a GPT's, numbers that are not finite, a file with Python objects in it, or no
            tokenizer.
    """
    source = locate(source)
    return _import(recipe, source, tokenizer or _tokenizer_beside(source), output)


@attested("import-paddle", "source", "tokenizer")
def _import(recipe: Recipe, source: Path, tokenizer: Path, output: Path) -> GPTConfig:
    claim_output_folder(output, CHECKPOINT, source, tokenizer)
    heads = recipe.Model.num_attention_heads
    arrays, degree = read_model(source, heads)
    ranges = {name: arrays.pop(name) for name in list(arrays) if name.endswith(QUANTIZERS)}
    config = _shape(arrays, heads, source)
    # The names of the parts do not show that the last ranks are missing, but the heads do:
    # PaddleFleetX prunes models in one part only.
    if degree > 1 and set(config.n_head) != {heads}:
        raise UserError(
            f"{source}: {degree} tensor-parallel parts with {config.n_head[0]} heads, but "
            f"Model.num_attention_heads is {heads}",
            "copy the parts of the missing ranks too, or give the recipe of this model",
            Code.MISMATCH,
        )
    config = config.with_quantization(_plan(config, ranges, source))
    weights: Arrays = {}
    for name, array in arrays.items():
        wide = array.astype(np.float32)
        weights[name] = by_projection(wide, config.head_dim) if GPT2.is_fused(name) else wide
        if not np.isfinite(wide).all():
            raise non_finite(source, name)
    vocabulary = load_tokenizer(tokenizer)
    hint = "give the tokenizer that the model was trained with"
    require_vocabulary(vocabulary, config, tokenizer, hint)
    write_imported(output, weights, config, vocabulary, recipe, "paddlefleetx")
    return config


def export_checkpoint(model: Path, output: Path, dtype: str = "float32") -> Path:
    """Write a checkpoint folder as `output/mp_00_sharding_00_pp_00/model.pdparams`; returns its
    path.

    A pruned model keeps its widths; of a quantized one, the float weights are written.

    Raises:
        UserError: a weight that `dtype` cannot hold.
    """
    claim_output_folder(output, PADDLE_CHECKPOINT, model)
    source = open_folder(model)
    folder, config = source.path, source.config
    require_gpt2(config, folder, "the format of PaddleFleetX")
    require_size([source.verified.path / WEIGHTS], config)
    arrays: Arrays = {}
    tensors = dict(read_tensors(folder / WEIGHTS, "np", GPT2))
    drop_tied_head(tensors, GPT2, folder / WEIGHTS)
    for name, array in tensors.items():
        if GPT2.is_fused(name):
            array = by_head(array, config.head_dim)
        arrays[their_name(name)] = narrow = array.astype(dtype)
        if not np.isfinite(narrow).all():
            raise UserError(
                f"{folder}: {name} does not fit {dtype}", "use --dtype float32", Code.INVALID_VALUE
            )
    metadata = {"source": source.digest, "dtype": dtype}
    with atomic_folder(output, PADDLE_CHECKPOINT) as work:
        (work / PART).mkdir()
        write_pdparams(work / PART / FILE, arrays)
        (work / PADDLE_CHECKPOINT.metadata_file).write_text(json.dumps(metadata), encoding="utf-8")
    return output / PART / FILE


def _tokenizer_beside(source: Path) -> Path:
    """The folder of the model's file or archive, or the model's own folder, if it has a tokenizer;
    of a rank's folder, the one around it too.

    Raises:
        UserError: there is none.
    """
    # Absolute, so that `.` has a name and a folder around it.
    folder = (source if source.is_dir() else source.parent).absolute()
    for candidate in (folder, folder.parent) if Rank.of(folder.name) else (folder,):
        if tokenizer_files(candidate):
            return candidate
    raise UserError(
        f"{source}: no tokenizer beside the model",
        "give --tokenizer PATH, or put GPT-2's gpt2-vocab.json and gpt2-merges.txt beside it",
        Code.NOT_FOUND,
    )


def _plan(config: GPTConfig, ranges: Arrays, path: Path) -> QuantizationPlan | None:
    """The plan of PaddleSlim's fake quantization; None for a float model. Linears without
    quantizers stay in float."""
    if not ranges:
        return None
    linears: dict[str, LinearFormat] = {}
    for name in config.linear_names():
        absmax, weight, bound = (ranges.get(f"{name}.{kind}") for kind in QUANTIZERS)
        if absmax is None and weight is None:
            continue
        limit = 0.0 if absmax is None else float(absmax.max())
        if bound is not None:  # PACT clips there
            limit = min(limit, float(bound.max()))
        if weight is None or not 0 < limit < math.inf:
            raise UserError(
                f"{path}: the quantized {name} has no range of its input",
                "train it with activation_quantize_type moving_average_abs_max, or give the "
                "float model and quantize it with Lathe",
                Code.INCOMPLETE,
            )
        fmt = WeightFormat("abs_max" if weight.size == 1 else "channel_wise_abs_max")
        linears[name] = LinearFormat(fmt, "int8", limit / ACTIVATION_LEVELS)
    return QuantizationPlan(linears)


def _shape(arrays: Arrays, n_head: int, path: Path) -> GPTConfig:
    """The shape of the model, derived from its tensors; the head size is `hidden / n_head`."""
    try:
        V, C = arrays[GPT2.table].shape
        positions = GPT2.embeddings[1]
        layers = 1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("h."))
        if C % n_head:
            raise UserError(
                f"{path}: hidden size {C} is not a multiple of Model.num_attention_heads {n_head}",
                "give the recipe of this model",
                Code.MISMATCH,
            )
        D = C // n_head
        qkv, ffn = GPT2.column("heads"), GPT2.column("channels")
        config = GPTConfig(
            vocab_size=V,
            n_positions=arrays[f"{positions}.weight"].shape[0],
            n_embd=C,
            head_dim=D,
            n_head=tuple(
                arrays[f"h.{i}.{qkv.name}.weight"].shape[1] // (len(qkv.parts) * D)
                for i in range(layers)
            ),
            n_inner=tuple(arrays[f"h.{i}.{ffn.name}.weight"].shape[1] for i in range(layers)),
        )
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"{path}: not a complete GPT: {error}", "give a GPT checkpoint", Code.INCOMPLETE
        ) from error
    require_fit(path, {name: a.shape for name, a in arrays.items()}, dict(config.tensor_shapes()))
    return config


def locate(source: Path) -> Path:
    """The file or folder that is meant: `.../model` is PaddleFleetX's spelling of
    `.../model.pdparams`."""
    file = source.with_name(f"{source.name}{ENDING}") if source.name else source
    return file if not source.exists() and file.is_file() else source


def read_model(source: Path, heads: int) -> tuple[Arrays, int]:
    """The tensors of a model by Lathe's name (see `to_lathe_names`), merged, and the
    tensor-parallel degree.

    Args:
        source: a `.pdparams` file, a folder with the model at any depth, or a tar archive with it,
            compressed or not; of an archive nothing but the model is read.
        heads: see `to_lathe_names`.

    Raises:
        UserError: no model, several, a missing rank, ranks that contradict each other, or a file
            that is broken or holds anything but arrays.
    """
    kept: dict[tuple[int, int], tuple[str, Arrays]] = {}
    seen: set[Rank] = set()
    for rank, where, stored in _parts(source):
        arrays = to_lathe_names(stored, heads, where)
        seen.add(rank)
        # Of the sharding ranks, which hold the same, only the first is kept.
        first = kept.setdefault((rank.pp, rank.mp), (where, arrays))
        _require_same(first, (where, arrays), rank)
    degrees = [range(1 + max(rank[i] for rank in seen)) for i in range(len(Rank._fields))]
    ranks = (Rank(*position) for position in product(*degrees))
    if missing := list(islice((rank for rank in ranks if rank not in seen), 4)):
        raise UserError(
            f"{source}: {', '.join(map(str, missing))} missing, of "
            f"{math.prod(map(len, degrees))} parts",
            COPY,
            Code.INCOMPLETE,
        )
    # First the slices of each stage, along their axes, then the layers of all stages.
    degree = 1 + max(rank.mp for rank in seen)
    stages = [
        _merge_slices([kept[pp, mp] for mp in range(degree)], source)
        for pp in range(1 + max(rank.pp for rank in seen))
    ]
    return _merge_stages(stages, source), degree


def _parts(source: Path) -> Iterator[tuple[Rank, str, Arrays]]:
    """Rank, file and tensors of every part, one in memory at a time."""
    if source.is_file() and is_tar(source):
        parts: list[PurePosixPath] = []
        for name, file in files_in_tar(source, _is_model):
            parts.append(PurePosixPath(name))
            _require_one_model(parts, source)
            where = f"{source}: {name}"
            yield Rank.of(parts[-1].parent.name) or Rank(), where, load_pdparams(file, where)
        if not parts:
            raise UserError(
                f"{source}: no {FILE} in this archive",
                "give the archive of a PaddleFleetX model",
                Code.WRONG_KIND,
            )
        return
    if not source.is_dir():
        # The file of one rank among several stands for all of them.
        path = source
        is_part = path.name == FILE and Rank.of(path.parent.name)
        if not is_part or len(_ranks(path.parent.parent)) == 1:
            yield Rank(), str(path), read_pdparams(path)
            return
        source = path.parent
    for path in _files(source):
        yield Rank.of(path.parent.name) or Rank(), str(path), read_pdparams(path)


def _files(folder: Path) -> list[Path]:
    """The files of the model in a folder, or of the whole model if it is the folder of one rank."""
    parent = folder.absolute().parent
    if Rank.of(folder.absolute().name):
        folder = parent
    parts = _ranks(folder)
    files = (
        [path / FILE for path in parts]
        if parts
        else sorted(p for p in folder.rglob(f"*{FILE}") if _is_model(p.relative_to(folder)))
    )
    if not files:
        raise UserError(
            f"{folder}: no {FILE} in this folder or below",
            f"give {FILE}, or the folder or archive that contains it",
            Code.WRONG_KIND,
        )
    _require_one_model([PurePosixPath(path) for path in files], folder)
    if missing := [path for path in files if not path.is_file()]:
        raise UserError(f"{missing[0]}: no such file", COPY, Code.INCOMPLETE)
    return files


def _ranks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("mp_*_sharding_*_pp_*") if Rank.of(path.name))


def _is_model(path: PurePosixPath | Path) -> bool:
    """Whether a file in an archive or folder is a model's; macOS adds hidden files `._*`."""
    return path.name == FILE and not any(part.startswith(".") for part in path.parts)


def _require_one_model(parts: list[PurePosixPath], source: Path) -> None:
    folders = {p.parent.parent if Rank.of(p.parent.name) else p.parent for p in parts}
    if len(folders) > 1:
        names = ", ".join(sorted(str(folder) for folder in folders)[:4])
        raise UserError(
            f"{source}: more than one model: {names}", "give the folder of one", Code.AMBIGUOUS
        )
    if len(set(parts)) < len(parts):
        raise UserError(f"{source}: {parts[-1]} is there twice", COPY, Code.DUPLICATE)


def _require_same(first: tuple[str, Arrays], other: tuple[str, Arrays], rank: Rank) -> None:
    """Raise UserError unless a sharding rank has the same weights as the first one."""
    (before, ours), (where, theirs) = first, other
    if ours is theirs:
        return
    if any(ours[name].shape != theirs[name].shape for name in ours.keys() & theirs.keys()):
        raise UserError(
            f"{where}: other shapes than in {before}: not the whole weights, but a partition",
            "save again with PaddleFleetX, which gathers the parameters of stage 3 first",
            Code.UNSUPPORTED,
        )
    differing = sorted(
        name
        for name in ours.keys() | theirs.keys()
        if _is_weight(name)  # quantizers may differ
        and not (name in ours and name in theirs and np.array_equal(ours[name], theirs[name]))
    )
    if differing:
        raise UserError(
            f"{where}: {differing[0]} differs from {before}, but sharding ranks hold the same",
            "give parts of the same step",
            Code.MISMATCH,
        )


def _is_weight(name: str) -> bool:
    return name.endswith((".weight", ".bias"))


def _merge_slices(parts: list[tuple[str, Arrays]], source: Path) -> Arrays:
    """The whole tensors of a pipeline stage from the slices of its tensor-parallel ranks."""
    (before, first), *others = parts
    if not others:
        return first
    for where, arrays in others:
        if names := sorted(first.keys() ^ arrays.keys()):
            raise UserError(
                f"{where}: {names[0]} is there or in {before} only", COPY, Code.INCOMPLETE
            )
    merged: Arrays = {}
    for name in first:
        slices = [arrays[name] for _, arrays in parts]
        axis = _split_axis(name, slices[0].size)
        if not _is_weight(name) and axis is None:  # a range: the widest that a rank has seen
            merged[name] = np.maximum.reduce(slices)
        elif axis is None:
            for (where, _), array in zip(parts, slices, strict=True):
                if not np.array_equal(array, slices[0]):
                    raise UserError(
                        f"{where}: {name} differs from {before}, but is not split between ranks",
                        "give parts of the same step",
                        Code.MISMATCH,
                    )
            merged[name] = slices[0]
        else:
            try:
                merged[name] = np.concatenate(slices, axis=axis)
            except ValueError as error:
                raise UserError(
                    f"{source}: the parts of {name} do not fit: {error}", COPY, Code.MISMATCH
                ) from None
    return merged


def _split_axis(name: str, size: int) -> int | None:
    """The axis along which ranks hold slices of a tensor; None if each holds all of it."""
    if name == GPT2.table:
        return 0
    inner = re.sub(rf"^{GPT2.blocks}\.\d+\.", "", name)
    linear = next((known for known in SPLIT if inner.startswith(f"{known}.")), None)
    if linear is None:
        return None
    kind = inner.removeprefix(f"{linear}.")
    if kind == "weight":
        return SPLIT[linear]
    # A column linear's outputs are split, and with them its bias and their ranges; a row linear's
    # bias is added once, to the sum over the ranks.
    is_column = SPLIT[linear] == 1
    if kind == "bias":
        return 0 if is_column else None
    return 0 if is_column and kind == WEIGHT_RANGE and size > 1 else None


def _merge_stages(stages: list[Arrays], source: Path) -> Arrays:
    """All layers. The last stage holds the token embedding too, which it shares with the first,
    and position embeddings of its own, which it never uses."""
    merged = dict(stages[0])
    positions = f"{GPT2.embeddings[1]}.weight"
    for number, arrays in enumerate(stages[1:], 1):
        for name, array in arrays.items():
            if name == positions:
                continue
            if name in merged and not np.array_equal(merged[name], array):
                raise UserError(
                    f"{source}: pp_{number:02} has another {name} than a stage before it",
                    "give parts of the same step",
                    Code.MISMATCH,
                )
            merged[name] = array
    return merged
