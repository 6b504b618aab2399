"""Converts PaddleFleetX's GPT checkpoints to and from checkpoint folders, without Paddle or torch.

A PaddleFleetX checkpoint is `mp_00_sharding_00_pp_00/model.pdparams`, with linears (in, out) as in
HF's files, a fused qkv ordered head by head, and its own names. Source: PaddleFleetX release 2.4,
`ppfleetx/models/language_model/gpt/dygraph/single_model.py`.
"""

import json
import math
from pathlib import Path

import numpy as np

from lathe.backends.imported import write_imported
from lathe.backends.paddle_names import QUANTIZERS, Arrays, by_head, by_projection, their_name
from lathe.backends.paddle_parts import FILE, PART, Rank, locate, read_model
from lathe.backends.pdparams import write_pdparams
from lathe.data.tokenizer import tokenizer_files
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


def import_checkpoint(
    recipe: Recipe, source: Path, tokenizer: Path | None, output: Path
) -> GPTConfig:
    """Write a checkpoint folder from PaddleFleetX's GPT; float16 becomes float32.

    A model that PaddleSlim has fake-quantized keeps its float weights, and the ranges of its inputs
    become the checkpoint's quantization plan.

    Args:
        recipe: gives `Model.num_attention_heads`, which cannot be derived from the tensors.
        source: `model.pdparams`, with or without its extension; a folder or tar archive that
            contains it, or the parts of several ranks (see `lathe.backends.paddle_parts`).
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
    write_imported(output, weights, config, tokenizer, recipe, "paddlefleetx")
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
        if bound is not None:
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
