"""Names of Megatron's tensors, and how their tensor-parallel parts are joined.

A column-parallel linear is divided by its rows, a row-parallel one by its columns; layer norms,
positions and the biases of row-parallel linears are the same in every part.
Sources: megatron/model/transformer.py and megatron/mpu/layers.py of Megatron-DeepSpeed at b4d4a0e.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.backends.megatron_metadata import TrainingFlags
from lathe.model.families import GPT2
from lathe_base.errors import UserError, printable

Array = NDArray[Any]
HINT = "give a GPT checkpoint of Megatron-LM or Megatron-DeepSpeed"
QKV = GPT2.column("heads").name
NAMES = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": QKV,
    "self_attention.dense": GPT2.row("heads").name,
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": GPT2.column("channels").name,
    "mlp.dense_4h_to_h": GPT2.row("channels").name,
}
"""Megatron's modules of a block -> Hugging Face's."""
WHOLE = {
    "embedding.word_embeddings.weight": "wte.weight",
    "embedding.position_embeddings.weight": "wpe.weight",
    "final_layernorm.weight": "ln_f.weight",
    "final_layernorm.bias": "ln_f.bias",
    "word_embeddings_for_head.weight": "wte.weight",  # the copy of a last pipeline rank
}
"""Megatron's tensors outside of blocks -> Hugging Face's."""
BLOCK = re.compile(r"layers\.(\d{1,5})\.(.+)\.(weight|bias)")


def own_name(theirs: str, path: Path) -> str:
    """Hugging Face's name of a tensor of Megatron; `path` is its file.

    Raises:
        UserError: it is not a tensor of a GPT-2.
    """
    name = re.sub(r"^(?:module\.)*(?:language_model\.)?(?:(?:encoder|transformer)\.)?", "", theirs)
    if name in WHOLE:
        return WHOLE[name]
    if match := BLOCK.fullmatch(name):
        module = re.sub(r"^attention\.", "self_attention.", match[2])
        if module in NAMES:
            return f"h.{int(match[1])}.{NAMES[module]}.{match[3]}"
    raise UserError(f"{path}: {printable(theirs)} is not a tensor of Megatron's GPT-2", HINT)


def join_parts(name: str, parts: Sequence[Array], flags: TrainingFlags) -> Array:
    """Join the tensor-parallel parts of a tensor, and transpose linears to (in, out).

    Raises:
        ValueError: parts that do not fit.
    """
    module, _, kind = name.rpartition(".")
    linear = next((x for x in GPT2.linears if module.endswith(f".{x.name}")), None)
    if linear is None and name != "wte.weight":
        return _replicated(parts)
    if linear is None:
        return np.concatenate(parts)
    if kind == "weight" and any(part.ndim != 2 for part in parts):
        raise ValueError("not a matrix")
    if linear.style == "row":
        return np.concatenate(parts, 1).T if kind == "weight" else _replicated(parts)
    joined = _by_projection(parts, flags) if linear.name == QKV else np.concatenate(parts)
    return joined.T if kind == "weight" else joined


def _replicated(parts: Sequence[Array]) -> Array:
    for rank, part in enumerate(parts):
        if not np.array_equal(part, parts[0]):
            raise ValueError(f"differs between tensor-parallel ranks 0 and {rank}")
    return parts[0]


def _by_projection(parts: Sequence[Array], flags: TrainingFlags) -> Array:
    """Join fused queries, keys and values (rows, ...) to all q, all k, all v.

    A part has the heads of one rank, in this order: 3, heads, size of a head (version 0); heads,
    size, 3 (version 1); heads, 3, size (from version 2 on).
    """
    heads, rest = divmod(flags.num_attention_heads, len(parts))
    if rest or not heads:
        raise ValueError(f"{flags.num_attention_heads} heads are not divided by {len(parts)} ranks")
    ordered = []
    for part in parts:
        if part.ndim not in (1, 2) or part.shape[0] % (3 * heads):
            raise ValueError(f"its shape {part.shape} does not fit {heads} heads per rank")
        size, inner = part.shape[0] // (3 * heads), part.shape[1:]
        if flags.version >= 2:
            ordered.append(part.reshape(heads, 3, size, *inner).swapaxes(0, 1))
        elif flags.version == 1:
            ordered.append(np.moveaxis(part.reshape(heads, size, 3, *inner), 2, 0))
        else:
            ordered.append(part.reshape(3, heads, size, *inner))
    joined = np.concatenate(ordered, 1)
    return joined.reshape(-1, *joined.shape[3:])
