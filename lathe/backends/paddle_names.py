"""Names of the tensors in PaddleFleetX's checkpoints, and the same tensors under Lathe's names.

A single card writes `gpt.decoder.layers.0.linear1.weight`. Wrappers of parallel training put
`_layers.` in front (Paddle's `MetaParallelBase`). A pipeline stage numbers its layers from the
start of the whole model, the embedding first (`1.linear1.weight` is the first block, and the layer
after the last block is the final norm), and stores the embeddings as `shared_layers.embed`, in the
last stage too; with virtual stages, a layer's number is the chunk's first layer and the place in
the chunk (`5.0.linear1.weight`). PaddleSlim wraps a quantized linear: its weight is
`linear1._layer.weight`, and its quantizers are named as in `QUANTIZERS`.

Sources: PaddleFleetX, `ppfleetx/models/language_model/gpt/dygraph/{single,hybrid}_model.py`;
PaddlePaddle 2.6, `fleet/meta_parallel/parallel_layers/pp_layers.py`, `nn/quant/quant_layers.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.model.families import GPT2
from lathe_base.errors import Code, UserError

Arrays = dict[str, NDArray[Any]]

ROOT = "gpt."
OURS = {theirs: ours for ours, theirs in GPT2.fleetx_names.items()}
QKV = GPT2.column("heads").name
SEPARATE = tuple(f"self_attn.{name}_proj" for name in "qkv")
"""Linears of a model without `fuse_attn_qkv`, in the order in which they are fused."""
WRAPPERS = {"_layers", "_layer"}

INPUT_RANGE = "_fake_quant_input._scale"
WEIGHT_RANGE = "_fake_quant_weight._scale"
CLIPPED_AT = "_act_preprocess.alpha"
QUANTIZERS = (INPUT_RANGE, WEIGHT_RANGE, CLIPPED_AT)
"""A quantized linear's absolute maximum of its input (a moving average) and of its weight (one, or
one for each output), and PACT's bound of the input. Its other quantizer tensors are not needed:
the average's state, and the range of the output, which is not quantized in training."""

BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
LAYER = re.compile(r"(\d+)(?:\.(\d+))?\.(.+)")
SHARED = re.compile(r"(?:shared_layers\.embed|\d+\.\d+|\d+\.embed)\.((?:word|position)_embeddings)")
FINAL_NORM = "norm"
EMBEDDINGS = tuple(f"{name}.weight" for name in GPT2.embeddings)


def to_lathe_names(stored: Mapping[str, NDArray[Any]], heads: int, where: str) -> Arrays:
    """The tensors of one file under Lathe's names, q, k and v fused head by head.

    Args:
        heads: of the whole model before pruning; the head size is the hidden size / `heads`.
        where: the file, for messages.

    Returns:
        `h.0.mlp.c_fc.weight`, and of a quantized linear also those of `QUANTIZERS`, such as
        `h.0.mlp.c_fc._fake_quant_input._scale`.

    Raises:
        UserError: a tensor that is not of PaddleFleetX's GPT, not of floats, or there under two
            names.
    """
    arrays: Arrays = {}
    known_as: dict[str, str] = {}
    for theirs, array in stored.items():
        if array.dtype.kind != "f":
            raise UserError(
                f"{where}: {theirs} contains {array.dtype}, not floats",
                "give a GPT checkpoint",
                Code.UNSUPPORTED,
            )
        lathe_name = to_lathe_name(theirs, where)
        if lathe_name is None:
            continue
        # A virtual stage stores the embeddings twice: as shared, and in its chunk.
        is_shared = lathe_name in EMBEDDINGS and np.array_equal(
            arrays.get(lathe_name, array), array
        )
        if lathe_name in arrays and not is_shared:
            raise UserError(
                f"{where}: {known_as[lathe_name]} and {theirs} are the same tensor",
                "remove one",
                Code.DUPLICATE,
            )
        arrays[lathe_name], known_as[lathe_name] = array, theirs
    return _fused(arrays, heads, where)


def to_lathe_name(theirs: str, where: str) -> str | None:
    """Lathe's name of a tensor; None for one that is not needed.

    Raises:
        UserError: not a tensor of PaddleFleetX's GPT.
    """
    # Quantizers' names begin with an underscore, and have dots of their own.
    parts = [part for part in theirs.split(".") if part not in WRAPPERS]
    split = next((i for i, part in enumerate(parts) if part.startswith("_")), len(parts) - 1)
    module, kind = ".".join(parts[:split]), ".".join(parts[split:])
    module_name = _lathe_module(module.removeprefix(ROOT))
    if module_name is None or not (kind in ("weight", "bias") or kind.startswith("_")):
        raise UserError(
            f"{where}: {theirs} is not a tensor of PaddleFleetX's GPT",
            "give a GPT checkpoint",
            Code.UNSUPPORTED,
        )
    return f"{module_name}.{kind}" if kind in ("weight", "bias", *QUANTIZERS) else None


def _lathe_module(theirs: str) -> str | None:
    if theirs in OURS:
        return OURS[theirs]
    if match := SHARED.fullmatch(theirs):
        return OURS.get(f"embeddings.{match[1]}")
    if match := BLOCK.fullmatch(theirs):
        layer, inner = int(match[1]), match[2]
    elif match := LAYER.fullmatch(theirs):
        # In a pipeline the embedding is layer 0, and the first block layer 1.
        layer, inner = int(match[1]) + int(match[2] or 0) - 1, match[3]
        if inner == FINAL_NORM:
            return GPT2.final_norm
    else:
        return None
    if layer < 0 or not (inner in OURS or inner in SEPARATE):
        return None
    return f"{GPT2.blocks}.{layer}.{OURS.get(inner, inner)}"


def _fused(arrays: Arrays, heads: int, where: str) -> Arrays:
    """The tensors with q, k and v of every block in one linear; quantizers of the three become one
    with the widest range, since they read the same input."""
    fused: Arrays = {}
    separate: dict[str, list[NDArray[Any] | None]] = {}
    for name, array in arrays.items():
        for i, linear in enumerate(SEPARATE):
            if f".{linear}." in name:
                parts = separate.setdefault(name.replace(linear, QKV), [None] * len(SEPARATE))
                parts[i] = array
                break
        else:
            fused[name] = array
    for name, parts in separate.items():
        three = [part for part in parts if part is not None]
        if len(three) < len(SEPARATE) or name in fused or len({x.shape for x in three}) > 1:
            raise UserError(
                f"{where}: q_proj, k_proj and v_proj of {name} are not three of one shape",
                "give a GPT checkpoint",
                Code.UNSUPPORTED,
            )
        if name.endswith(QUANTIZERS) and three[0].size == 1:
            fused[name] = np.maximum.reduce(three)
            continue
        # The hidden size is a norm's: tensor parallelism divides the columns of q, k and v.
        norm = arrays.get(f"{GPT2.blocks}.{name.split('.')[1]}.{GPT2.block_norms[0]}.weight")
        hidden, width = 0 if norm is None else norm.size, three[0].shape[-1]
        if not hidden or hidden % heads or width % (hidden // heads):
            raise UserError(
                f"{where}: {width} columns of q_proj are not a multiple of the head size, {hidden} "
                f"/ Model.num_attention_heads {heads}",
                "give the recipe of this model",
                Code.MISMATCH,
            )
        fused[name] = by_head(np.concatenate(three, axis=-1), hidden // heads)
    return fused


def their_name(ours: str) -> str:
    """PaddleFleetX's name, on a single card, of a tensor of Lathe's."""
    if match := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", ours):
        return f"{ROOT}decoder.layers.{match[1]}.{GPT2.fleetx_names[match[2]]}.{match[3]}"
    module, _, kind = ours.rpartition(".")
    return f"{ROOT}{GPT2.fleetx_names[module]}.{kind}"


def by_head(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """All q, all k, all v (HF's files) -> head by head (Paddle's models)."""
    # (..., 3, H, D) -> (..., H, 3, D)
    parts = array.reshape(*array.shape[:-1], 3, -1, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)


def by_projection(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """The inverse of `by_head`."""
    parts = array.reshape(*array.shape[:-1], -1, 3, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)
