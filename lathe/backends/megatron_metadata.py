"""The flags of the training that a checkpoint of Megatron contains, and what follows from them."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from lathe.backends.megatron_files import CheckpointFiles
from lathe.backends.torch_file import open_torch_file
from lathe.backends.torch_pickle import Placeholder
from lathe_base.errors import UserError, printable

log = logging.getLogger("lathe")

NOT_GPT2 = "only GPT-2's architecture is supported"
EPSILON = 1e-5


@dataclass(frozen=True)
class TrainingFlags:
    """What the import needs of the flags.

    Attributes:
        version: `checkpoint_version`, which decides the order of queries, keys and values.
        num_layers: None if the checkpoint has no flags.
        head_dim: size of a head; None: hidden size / heads.
    """

    version: float
    num_attention_heads: int
    num_layers: int | None
    head_dim: int | None
    layer_norm_epsilon: float


def read_training_flags(files: CheckpointFiles, heads: int) -> TrainingFlags:
    """The flags in a checkpoint's metadata.

    Args:
        heads: number of attention heads, if the checkpoint has no flags.

    Raises:
        UserError: a file that cannot be read, flags of a model that is not a GPT-2, or of another
            number of tensor-parallel ranks.
    """
    path = files.metadata
    with open_torch_file(path) as file:
        value = file.value
    if not isinstance(value, dict):
        raise UserError(f"{path}: contains no metadata by name", "give a checkpoint of Megatron")
    args = value.get("args")
    flags = dict(vars(args)) if isinstance(args, Placeholder) else {}
    version = value.get("checkpoint_version", 0)
    if not _is_number(version) or (version < 2 and version not in (0, 1)):
        what = f"{path}: checkpoint_version is {_shown(version)}"
        raise UserError(what, "only 0, 1.0 and 2.0 or later are supported")
    if not flags:
        log.warning("%s: no flags of the training: taking %d attention heads", path, heads)
    _require_gpt2(flags, str(path))
    ranks = flags.get("tensor_model_parallel_size", flags.get("model_parallel_size"))
    count = len(files.pieces[0])
    if _is_number(ranks) and ranks != count:
        what = f"{files.folder}: {count} of {ranks} tensor-parallel ranks"
        raise UserError(what, "copy all parts of the checkpoint, those of every node")
    if flags.get("bias_gelu_fusion") is False and not flags.get("openai_gelu"):
        log.warning(
            "%s: trained with the exact GELU; Lathe computes GPT-2's approximation, which differs "
            "by less than 0.001",
            path,
        )
    epsilon = flags.get("layernorm_epsilon", EPSILON)
    return TrainingFlags(
        version=float(version),
        num_attention_heads=_size(flags, "num_attention_heads", str(path)) or heads,
        num_layers=_size(flags, "num_layers", str(path)),
        head_dim=_size(flags, "kv_channels", str(path)),
        layer_norm_epsilon=float(epsilon) if _is_number(epsilon) and 0 < epsilon < 1 else EPSILON,
    )


def _require_gpt2(flags: dict[str, Any], path: str) -> None:
    """Raise UserError if the flags describe a model that Lathe would compute differently."""
    experts = flags.get("num_experts")
    if experts not in (None, 1, [1], []):
        what = f"{path}: trained with --num-experts: mixtures of experts are not supported"
        raise UserError(what, NOT_GPT2)
    for name in (
        *("apply_residual_connection_post_layernorm", "swiglu", "use_rotary_position_embeddings"),
        *("apply_layernorm_1p", "group_query_attention", "untie_embeddings_and_output_weights"),
    ):
        if flags.get(name) is True:
            raise UserError(f"{path}: trained with --{name.replace('_', '-')}", NOT_GPT2)


def _size(flags: dict[str, Any], name: str, path: str) -> int | None:
    value = flags.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
        what = f"{path}: its {name} is {_shown(value)}, not a number of them"
        raise UserError(what, "copy the checkpoint again")
    return value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _shown(value: Any) -> str:
    """A value for a message: containers, which may be huge, by their type."""
    plain = isinstance(value, str | int | float) or value is None
    return printable(repr(value), 60) if plain else f"a {type(value).__name__}"
