"""Converts GPT checkpoints of Megatron-LM and Megatron-DeepSpeed to checkpoint folders.

The parts of tensor and pipeline parallelism are joined. Linears are stored as (out, in), and the
rows of the fused queries, keys and values are ordered by `checkpoint_version`. Nothing in the files
is executed: see `lathe.backends.torch_file`.

A model is in several files: one for each tensor-parallel rank, and one for each pipeline rank or,
with DeepSpeed's pipelines, for each layer. The layouts, with T the tensor-parallel rank, P the
pipeline rank and L the layer:

    global_stepN/mp_rank_TT_model_states.pt            DeepSpeed without a pipeline
    global_stepN/layer_LL-model_TT-model_states.pt     DeepSpeed's PipelineModule
    iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt   Megatron-LM

Sources: megatron/checkpointing.py, megatron/model/ and megatron/mpu/layers.py of Megatron-DeepSpeed
at b4d4a0e; DeepSpeed, runtime/engine.py and runtime/pipe/module.py.
"""

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.backends.torch_file import Placeholder, TensorView, TorchFile, open_torch_file
from lathe.data.tokenizer import load_tokenizer
from lathe.model.config import GPTConfig
from lathe.model.families import GPT2
from lathe.model.folder import non_finite, require_fit, require_vocabulary, write_imported
from lathe_base.artifacts.kinds import CHECKPOINT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import read_text
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder

log = logging.getLogger("lathe")

TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
LAYER = re.compile(r"layer_(\d{2,5})-model_(\d{2,4})-model_states\.pt")
MODULE = re.compile(r"mp_rank_(\d{2,4})_model_states\.pt")
FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?")
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
ZERO_3 = "zero_pp_rank_*_mp_rank_*_model_states.pt"
EXPERTS = "*expert_*_model_states.pt"
FOLDER_HINT = (
    "give the folder global_stepN or iter_NNNNNNN, or the one that has it and names it in latest"
)
FEWER = "copy all parts of the checkpoint, those of every node"
COMPLETE = (
    "give all parts; and Model.num_attention_heads, if the checkpoint does not contain the flags "
    "of its training"
)
MODELS = re.compile(r"model(\d{0,3})|module")  # Megatron-LM's keys of models, and DeepSpeed's

Array = NDArray[Any]
Arrays = dict[str, Array]
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

NOT_GPT2 = "only GPT-2's architecture is supported"
EPSILON = 1e-5


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


@attested("import-megatron", "source", "tokenizer")
def import_megatron(recipe: Recipe, source: Path, tokenizer: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder from Megatron's GPT; float16 and bfloat16 become float32.

    Args:
        recipe: gives `Model.num_attention_heads` for checkpoints that do not contain the flags of
            their training.
        source: folder of one step, or the folder with several that names the newest.
        tokenizer: `tokenizer.json`, or a folder with GPT-2's BPE.

    Raises:
        UserError: missing parts, parts that contradict each other, tensors that are not a GPT-2's,
            values that are not finite, or a format that is not supported; see `find_files`.
    """
    claim_output_folder(output, CHECKPOINT, source, tokenizer)
    files = find_files(source)
    flags = read_training_flags(files, recipe.Model.num_attention_heads)
    weights = _read_model(files, flags)
    config = _shape(weights, flags, files.folder)
    vocabulary = load_tokenizer(tokenizer)
    hint = "give the tokenizer that the model was trained with"
    require_vocabulary(vocabulary, config, tokenizer, hint)
    write_imported(output, weights, config, vocabulary, recipe, "megatron")
    return config


def find_files(source: Path) -> CheckpointFiles:
    """The files of the checkpoint `source`, or of the newest one that `source` names.

    Raises:
        UserError: no checkpoint, one in a format that is not supported, or missing files.
    """
    if not source.is_dir():
        what = "not a folder" if source.exists() else "no such folder"
        raise UserError(f"{printable(source)}: {what}", FOLDER_HINT, Code.NOT_FOUND)
    folder = _newest(source)
    names = sorted(path.name for path in folder.iterdir())
    if any(folder.glob(EXPERTS)):
        what = f"{folder}: has experts, but mixtures of experts are not supported"
        raise UserError(what, "give a dense GPT", Code.UNSUPPORTED)
    layers = {(int(m[1]), int(m[2])): folder / m[0] for n in names if (m := LAYER.fullmatch(n))}
    modules = {(0, int(m[1])): folder / m[0] for n in names if (m := MODULE.fullmatch(n))}
    # DeepSpeed's pipelines have a file for each layer, and others with the flags beside them.
    if layers:
        if not modules:
            what = f"{folder}: no mp_rank_00_model_states.pt, which has the flags of the training"
            raise UserError(what, FEWER, Code.INCOMPLETE)
        return CheckpointFiles(folder, _pieces(folder, layers), modules[min(modules)], True)
    if modules:
        pieces = _pieces(folder, modules)
        return CheckpointFiles(folder, pieces, pieces[0][0])
    # Megatron-LM has a folder for each rank.
    ranks = {}
    for match in (m for n in names if (m := FOLDER.fullmatch(n))):
        paths = [folder / match[0] / name for name in MEGATRON_FILES]
        if not (present := [path for path in paths if path.exists()]):
            raise UserError(f"{paths[0].parent}: no {paths[0].name}", FEWER, Code.INCOMPLETE)
        ranks[int(match[2] or 0), int(match[1])] = present[0]
    if ranks:
        pipeline = {rank for rank, _ in ranks}
        if missing := sorted(set(range(len(pipeline))) - pipeline):
            raise UserError(
                f"{folder}: pipeline rank {missing[0]} is missing", FEWER, Code.INCOMPLETE
            )
        pieces = _pieces(folder, ranks)
        return CheckpointFiles(folder, pieces, pieces[0][0])
    # No files of a known layout: perhaps of one that can be converted there.
    if any(folder.glob(ZERO_3)):
        raise UserError(
            f"{folder}: ZeRO stage 3 has divided every weight among the data-parallel ranks",
            "save whole weights there: train a step with stage 2 or lower from this checkpoint, or "
            "with stage3_gather_16bit_weights_on_model_save",
            Code.UNSUPPORTED,
        )
    if any(folder.glob("*.distcp")):
        raise UserError(
            f"{folder}: a distributed checkpoint of Megatron-Core",
            "convert it there first, with --ckpt-convert-format torch",
            Code.UNSUPPORTED,
        )
    raise UserError(f"{folder}: no checkpoint of Megatron", FOLDER_HINT, Code.WRONG_KIND)


def _newest(source: Path) -> Path:
    """The folder of the step that the tracker in `source` names, or `source` itself."""
    for name in TRACKERS:
        tracker = source / name
        if not os.path.lexists(tracker):
            continue
        step = read_text(tracker, FOLDER_HINT, 100).strip()
        if not re.fullmatch(r"\w[\w.-]*", step):
            what = f"{tracker}: {printable(step, 60)!r} is not the name of a checkpoint"
            raise UserError(what, FOLDER_HINT, Code.MALFORMED)
        # The number of a step, whose folder either tool may have named; or the folder's name.
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


def _read_model(files: CheckpointFiles, flags: TrainingFlags) -> Arrays:
    """The joined weights under Hugging Face's names, as float32 and, for linears, (in, out)."""
    weights: Arrays = {}
    layers = 0
    for piece, key in _order(files):
        joined = dict(_join(piece, key, files, flags))
        # Layers are counted from 0 in each piece.
        local = {int(name.split(".")[1]) for name in joined if name.startswith("h.")}
        if local != set(range(len(local))):
            missing = next(i for i in range(len(local) + 1) if i not in local)
            raise UserError(f"{piece[0]}: layer {missing} is missing", HINT, Code.INCOMPLETE)
        for name, array in joined.items():
            lathe_name = name
            if match := re.fullmatch(r"h\.(\d+)\.(.+)", name):
                lathe_name = f"h.{layers + int(match[1])}.{match[2]}"
            if lathe_name in weights and not np.array_equal(weights[lathe_name], array):
                what = f"{piece[0]}: the tied copies of the word embedding differ"
                raise UserError(
                    what,
                    "give a checkpoint of a model whose output layer is tied",
                    Code.UNSUPPORTED,
                )
            weights[lathe_name] = array
        layers += len(local)
    if flags.num_layers not in (None, layers):
        what = f"{files.folder}: {layers} layers, but it was trained with {flags.num_layers}"
        raise UserError(
            what, "copy all parts of the checkpoint, those of every pipeline rank", Code.INCOMPLETE
        )
    return weights


def _order(files: CheckpointFiles) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield each piece, and the key of its model, in the order of the layers.

    With an interleaved pipeline each file has several models: the first layers are those of the
    first model of every rank.
    """
    if files.is_by_layer:
        yield from ((piece, "") for piece in files.pieces)
        return
    ordered = []
    for rank, piece in enumerate(files.pieces):
        with open_torch_file(piece[0]) as file:
            value = file.value
        keys = [k for k in value if isinstance(k, str)] if isinstance(value, dict) else []
        models = [match for key in keys if (match := MODELS.fullmatch(key))]
        if not models:
            raise UserError(f"{piece[0]}: no model in it", HINT, Code.WRONG_KIND)
        ordered += [(int(match[1] or 0), rank, piece, match[0]) for match in models]
    for _, _, piece, key in sorted(ordered, key=lambda one: one[:2]):
        yield piece, key


def _join(
    piece: Sequence[Path], key: str, files: CheckpointFiles, flags: TrainingFlags
) -> Iterator[tuple[str, Array]]:
    """Yield each tensor of a piece, joined over the tensor-parallel ranks; layers count from 0."""
    with ExitStack() as stack:
        # All files at once: a tensor is joined when it is read, and only one is in memory.
        opened = [stack.enter_context(open_torch_file(path)) for path in piece]
        parts = [_named_views(file, key) for file in opened]
        for file, part in zip(opened, parts, strict=True):
            if different := sorted(part.keys() ^ parts[0].keys()):
                what = (
                    f"{file.path}: {different[0]} is only in this part or in {opened[0].path.name}"
                )
                raise UserError(what, "copy the parts again", Code.INCOMPLETE)
        for name, (theirs, _) in parts[0].items():
            arrays = []
            for file, part in zip(opened, parts, strict=True):
                array = file.array(part[name][1])
                if array.dtype.kind != "f":
                    raise UserError(
                        f"{file.path}: {theirs} holds {array.dtype}, not floats",
                        HINT,
                        Code.UNSUPPORTED,
                    )
                if not np.isfinite(array).all():
                    raise non_finite(file.path, theirs)
                arrays.append(array)
            try:
                joined = join_parts(name, arrays, flags)
            except ValueError as error:
                raise UserError(
                    f"{opened[0].path}: {theirs}: {error}", HINT, Code.MISMATCH
                ) from None
            yield name, np.ascontiguousarray(joined, np.float32)


def _named_views(file: TorchFile, key: str) -> dict[str, tuple[str, TensorView]]:
    """The tensors of a file: own name -> Megatron's name and the tensor."""
    value = file.value.get(key) if key and isinstance(file.value, dict) else file.value
    tensors = dict(_flatten(value, file.path))
    # DeepSpeed's file of one layer leaves out what kind of layer it is.
    names, prefix = tensors.keys(), ""
    if not key:
        if "word_embeddings.weight" in names:
            prefix = "embedding."
        elif "input_layernorm.weight" in names:
            prefix = "layers.0."
        elif set(names) == {"weight", "bias"}:
            prefix = "final_layernorm."
        else:
            raise UserError(
                f"{file.path}: not a layer of a GPT: {printable(', '.join(names), 100)}",
                HINT,
                Code.UNSUPPORTED,
            )
    views: dict[str, tuple[str, TensorView]] = {}
    for theirs, view in tensors.items():
        name = to_lathe_name(prefix + theirs, file.path)
        # A last pipeline rank has the word embedding twice: as such, and for the head.
        if name in views and name != "wte.weight":
            raise UserError(
                f"{file.path}: {views[name][0]} and {theirs} are the same tensor",
                HINT,
                Code.DUPLICATE,
            )
        views.setdefault(name, (theirs, view))
    return views


def _flatten(value: Any, path: Path, above: str = "") -> Iterator[tuple[str, TensorView]]:
    """Yield the tensors of nested dictionaries by their dotted names."""
    if not isinstance(value, dict):
        raise UserError(f"{path}: contains no tensors by name", HINT, Code.WRONG_KIND)
    # Not value.items(): a pickle may have set an attribute `items` of an OrderedDict.
    for key, inner in dict.items(value):
        name = f"{above}{key}"
        if len(name) > 500:
            raise UserError(
                f"{path}: the name {printable(name, 60)} is too long", HINT, Code.MALFORMED
            )
        if isinstance(inner, TensorView):
            yield name, inner
        elif isinstance(inner, dict):
            yield from _flatten(inner, path, f"{name}.")
        elif inner is not None and not name.endswith("_extra_state"):  # of Transformer Engine
            raise UserError(f"{path}: {printable(name)} is not a tensor", HINT, Code.MALFORMED)


def _shape(weights: Mapping[str, Array], flags: TrainingFlags, folder: Path) -> GPTConfig:
    """The shape of the model, derived from its tensors and the number of heads."""
    channels = GPT2.column("channels").name
    try:
        V, C = weights["wte.weight"].shape
        layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
        heads = flags.num_attention_heads
        head_dim, rest = divmod(weights[f"h.0.{QKV}.weight"].shape[1], 3 * heads)
        if rest or head_dim != (flags.head_dim or C / heads):
            raise ValueError(
                f"attention of width {weights[f'h.0.{QKV}.weight'].shape[1] // 3} with {heads} "
                f"heads and a hidden size of {C}"
            )
        config = GPTConfig(
            vocab_size=V,
            n_positions=weights["wpe.weight"].shape[0],
            n_embd=C,
            head_dim=head_dim,
            n_head=(heads,) * layers,
            n_inner=tuple(weights[f"h.{i}.{channels}.weight"].shape[1] for i in range(layers)),
            layer_norm_epsilon=flags.layer_norm_epsilon,
        )
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"{folder}: not a complete GPT: {error}", COMPLETE, Code.INCOMPLETE
        ) from None
    require_fit(folder, {n: a.shape for n, a in weights.items()}, dict(config.tensor_shapes()))
    return config


def to_lathe_name(theirs: str, path: Path) -> str:
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
    raise UserError(
        f"{path}: {printable(theirs)} is not a tensor of Megatron's GPT-2", HINT, Code.UNSUPPORTED
    )


def join_parts(name: str, parts: Sequence[Array], flags: TrainingFlags) -> Array:
    """Join the tensor-parallel parts of a tensor, and transpose linears to (in, out).

    A column-parallel linear is divided by its rows, a row-parallel one by its columns; layer norms,
    positions and the biases of row-parallel linears are the same in every part.

    Raises:
        ValueError: parts that do not fit.
    """
    module, _, kind = name.rpartition(".")
    linear = next((x for x in GPT2.linears if module.endswith(f".{x.name}")), None)
    if linear is None and name != "wte.weight":
        return _replicated(parts)
    if linear is None:  # the word embedding, divided by its rows
        return np.concatenate(parts)
    if kind == "weight" and any(part.ndim != 2 for part in parts):
        raise ValueError("not a matrix")
    if linear.style == "row":  # its bias is added once, to the sum over the ranks
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
        raise UserError(
            f"{path}: contains no metadata by name",
            "give a checkpoint of Megatron",
            Code.WRONG_KIND,
        )
    # The flags are an argparse.Namespace, of which the unpickler makes a placeholder.
    args = value.get("args")
    flags = dict(vars(args)) if isinstance(args, Placeholder) else {}
    version = value.get("checkpoint_version", 0)
    if not _is_number(version) or (version < 2 and version not in (0, 1)):
        what = f"{path}: checkpoint_version is {_shown(version)}"
        raise UserError(what, "only 0, 1.0 and 2.0 or later are supported", Code.WRONG_VERSION)
    if not flags:
        log.warning("%s: no flags of the training: taking %d attention heads", path, heads)
    _require_gpt2(flags, str(path))
    # Ranks that are missing at the end leave no gap in the names: the flags say how many there
    # were. The second name is that of early versions.
    ranks = flags.get("tensor_model_parallel_size", flags.get("model_parallel_size"))
    count = len(files.pieces[0])
    if _is_number(ranks) and ranks != count:
        what = f"{files.folder}: {count} of {ranks} tensor-parallel ranks"
        raise UserError(
            what, "copy all parts of the checkpoint, those of every node", Code.INCOMPLETE
        )
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
        raise UserError(what, NOT_GPT2, Code.UNSUPPORTED)
    for name in (
        *("apply_residual_connection_post_layernorm", "swiglu", "use_rotary_position_embeddings"),
        *("apply_layernorm_1p", "group_query_attention", "untie_embeddings_and_output_weights"),
    ):
        if flags.get(name) is True:  # whatever else a pickle may have put there is not a flag
            raise UserError(
                f"{path}: trained with --{name.replace('_', '-')}", NOT_GPT2, Code.UNSUPPORTED
            )


def _size(flags: dict[str, Any], name: str, path: str) -> int | None:
    value = flags.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
        what = f"{path}: its {name} is {_shown(value)}, not a number of them"
        raise UserError(what, "copy the checkpoint again", Code.INVALID_VALUE)
    return value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _shown(value: Any) -> str:
    """A value for a message: containers, which may be huge, by their type."""
    plain = isinstance(value, str | int | float) or value is None
    return printable(repr(value), 60) if plain else f"a {type(value).__name__}"
