"""Converts PaddleFleetX's GPT checkpoints to and from checkpoint folders, without Paddle or torch.

A PaddleFleetX checkpoint is `mp_00_sharding_00_pp_00/model.pdparams`, with linears (in, out) as in
HF's files, a fused qkv ordered head by head, and its own names. Source: PaddleFleetX release 2.4,
`ppfleetx/models/language_model/gpt/dygraph/single_model.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from lathe.backends.pdparams import read_pdparams, write_pdparams
from lathe.backends.qkv import by_head, by_projection
from lathe.config.settings import Recipe
from lathe.data.tokenizer import load_tokenizer, vocab_size
from lathe.errors import UserError
from lathe.model.config import GPTConfig, read_config, require_gpt2
from lathe.model.families import GPT2
from lathe.model.folder import (
    WEIGHTS,
    checkpoint_digest,
    drop_tied_head,
    non_finite,
    read_marker,
    read_tensors,
    require_fit,
    require_size,
    resolve,
    write_folder,
)
from lathe.provenance.step import attested
from lathe.storage import atomic_folder, claim_output_folder
from lathe.storage.artifacts.kinds import CHECKPOINT, PADDLE_CHECKPOINT

PART = "mp_00_sharding_00_pp_00"
FILE = "model.pdparams"
ROOT = "gpt."
OURS = {theirs: ours for ours, theirs in GPT2.fleetx_names.items()}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")

Arrays = dict[str, NDArray[Any]]


@attested("import-paddle", "source", "tokenizer")
def import_checkpoint(recipe: Recipe, source: Path, tokenizer: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder from PaddleFleetX's GPT; float16 becomes float32.

    Args:
        recipe: gives `Model.num_attention_heads`, which cannot be derived from the tensors.
        source: `model.pdparams`, the `mp_00_sharding_00_pp_00` folder that has it, or the parent of
            that folder.
        tokenizer: `tokenizer.json`, or a folder with GPT-2's BPE.

    Raises:
        UserError: a model in several parts, names or shapes that are not a GPT's, numbers that are
            not finite, or a file with Python objects in it.
    """
    claim_output_folder(output, CHECKPOINT, source, tokenizer)
    path = _find(source)
    stored = read_pdparams(path)
    _require_floats(stored, path)
    heads = recipe.Model.num_attention_heads
    config = _shape({_own_name(name, path): array for name, array in stored.items()}, heads, path)
    weights = {
        name: by_projection(array, config.head_dim) if GPT2.is_fused(name) else array
        for name, array in ((_own_name(n, path), a.astype(np.float32)) for n, a in stored.items())
    }
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise non_finite(path, name)
    speaks = load_tokenizer(tokenizer)
    _require_vocabulary(speaks, config, tokenizer)

    def write_weights(file: Path) -> None:
        save_file({GPT2.prefix + n: array for n, array in weights.items()}, file, {"format": "pt"})

    with atomic_folder(output, CHECKPOINT) as work:
        write_folder(work, write_weights, config, speaks, "import", recipe, engine="paddlefleetx")
    return config


def export_checkpoint(model: Path, output: Path, dtype: str = "float32") -> Path:
    """Write a checkpoint folder as `output/mp_00_sharding_00_pp_00/model.pdparams`; returns its
    path.

    A pruned model keeps its widths; of a quantized one, the float weights are written.

    Raises:
        UserError: a weight that `dtype` cannot hold.
    """
    claim_output_folder(output, PADDLE_CHECKPOINT, model)
    folder = resolve(model)
    config = read_config(folder)
    require_gpt2(config, folder, "the format of PaddleFleetX")
    read_marker(folder)
    require_size([folder / WEIGHTS], config)
    arrays: Arrays = {}
    tensors = dict(read_tensors(folder / WEIGHTS, "np", GPT2))
    drop_tied_head(tensors, GPT2, folder / WEIGHTS)
    for name, array in tensors.items():
        if GPT2.is_fused(name):
            array = by_head(array, config.head_dim)
        arrays[_their_name(name)] = narrow = array.astype(dtype)
        if not np.isfinite(narrow).all():
            raise UserError(f"{folder}: {name} does not fit {dtype}", "use --dtype float32")
    metadata = {"source": checkpoint_digest(folder), "dtype": dtype}
    with atomic_folder(output, PADDLE_CHECKPOINT) as work:
        (work / PART).mkdir()
        write_pdparams(work / PART / FILE, arrays)
        (work / PADDLE_CHECKPOINT.metadata_file).write_text(json.dumps(metadata), encoding="utf-8")
    return output / PART / FILE


def _find(source: Path) -> Path:
    """Path of the only `model.pdparams`.

    Raises:
        UserError: there is none, or the model is in several parts.
    """
    if source.is_file():
        return source
    inner = source / PART if (source / PART).is_dir() else source
    others = sorted(p.name for p in inner.parent.glob("mp_*_sharding_*_pp_*") if p.name != PART)
    if inner.name == PART and others:
        raise UserError(
            f"{inner.parent}: the model is split into parts ({', '.join([PART, *others][:4])})",
            "merge them with PaddleFleetX first (mp, sharding and pp degree 1)",
        )
    path = inner / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file", f"give {FILE}, or the folder that contains it")
    return path


def _require_floats(stored: Arrays, path: Path) -> None:
    """Raise UserError if a tensor does not hold floats, or is there under two names."""
    seen: dict[str, str] = {}
    for name, array in stored.items():
        if array.dtype.kind != "f":
            raise UserError(
                f"{path}: {name} contains {array.dtype}, not floats", "give a GPT checkpoint"
            )
        own = _own_name(name, path)
        if own in seen:
            raise UserError(f"{path}: {seen[own]} and {name} are the same tensor", "remove one")
        seen[own] = name


def _own_name(theirs: str, path: Path) -> str:
    name = theirs.removeprefix(ROOT)
    if match := LAYER.fullmatch(name):
        linear, kind = match[2], match[3]
        if linear in OURS:
            return f"h.{match[1]}.{OURS[linear]}.{kind}"
    module, _, kind = name.rpartition(".")
    if module in OURS:
        return f"{OURS[module]}.{kind}"
    raise UserError(
        f"{path}: {theirs} is not a tensor of PaddleFleetX's GPT", "give a GPT checkpoint"
    )


def _their_name(ours: str) -> str:
    if match := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", ours):
        return f"{ROOT}decoder.layers.{match[1]}.{GPT2.fleetx_names[match[2]]}.{match[3]}"
    module, _, kind = ours.rpartition(".")
    return f"{ROOT}{GPT2.fleetx_names[module]}.{kind}"


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
        raise UserError(f"{path}: not a complete GPT: {error}", "give a GPT checkpoint") from error
    require_fit(path, {name: a.shape for name, a in arrays.items()}, dict(config.tensor_shapes()))
    return config


def _require_vocabulary(tokenizer: Tokenizer, config: GPTConfig, path: Path) -> None:
    if vocab_size(tokenizer) > config.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {vocab_size(tokenizer)} ids, the model {config.vocab_size}",
            "give the tokenizer that the model was trained with",
        )
