"""compressed-tensors: a Hugging Face folder that vLLM, SGLang and transformers read.

Weights keep their integers. Static INT8 activations keep their scale, and those with a scale per
token are rounded by the engine in the same way (W8A8). Activations that Lathe quantizes dynamically
in groups stay in float (W8A16, W4A16), which the format's engines support, and which is closer to
the float model. The token embedding and the head are dequantized to float16, because engines do not
look up integer rows.

Pruning leaves layers with different numbers of heads and channels, but Hugging Face's classes have
one number for all layers. The narrower layers get heads and channels of zeros, at the end of what
they belong to: key-value heads after the others, query heads after those of their group, channels
after the others. The linear that reads them has zeros in their columns, so that whatever they
compute is multiplied by zero, and the hidden state is the same sum with zeros added. Scales of
quantized weights do not change, as they depend on the largest magnitudes.

Source of the layout: the package `compressed-tensors`, `compressors/pack_quantized` and
`quantization/quant_config.py`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.data.tokenizer import save_tokenizer
from lathe.export.weight_formats import storage, stored_matrices
from lathe.model import fake_quant
from lathe.model.architecture import HEAD, Linear
from lathe.model.checkpoint import Checkpoint, join_rows, split_rows
from lathe.model.compressed_tensors import dequantized, read_schemes
from lathe.model.config import COMPRESSED_TENSORS, GPTConfig
from lathe.model.gpt import GPT
from lathe.model.integer_weights import IntegerWeight
from lathe.model.quantization import LinearFormat, QuantizationPlan
from lathe_base.artifacts.kinds import read_json
from lathe_base.artifacts.sampling import GENERATION
from lathe_base.errors import Code, UserError

ENGINE = "transformers"
FOLDER = COMPRESSED_TENSORS


def require(config: GPTConfig, folder: Path) -> None:
    """Raise UserError for a model that transformers and vLLM do not support."""
    hint = "remove compressed-tensors from Export.formats"
    family = config.architecture
    if config.prefix_tokens:
        raise UserError(
            f"{folder}: has a prefix of {config.n_prefix} tokens, which transformers does not "
            "compute",
            "quantize its parent with Compress.Quantization.prefix=none",
            Code.UNSUPPORTED,
        )
    config = uniform(config, folder)
    if not config.is_uniform:
        raise UserError(
            f"{folder}: its rotary embedding is not one of transformers'", hint, Code.UNSUPPORTED
        )
    if family.transposed and config.quantization:
        raise UserError(
            f"{folder}: is a {family.title} model, whose Conv1D layers compressed-tensors cannot "
            "quantize",
            hint,
            Code.UNSUPPORTED,
        )
    plan = config.quantization
    for layer, linear in ((i, x) for i in range(config.n_layer) for x in family.linears):
        fmt = plan.linears.get(f"{family.block(layer)}.{linear.name}") if plan else None
        inputs, _ = config.linear_shape(linear, layer)
        if fmt is not None and fmt.weight.group_size and inputs % fmt.weight.group_size:
            raise UserError(
                f"{folder}: the {inputs} inputs of {family.block(layer)}.{linear.name} are not a "
                f"multiple of the group size {fmt.weight.group_size}",
                f"quantize with another Compress.Quantization.group_size, or {hint}",
                Code.UNSUPPORTED,
            )


def uniform(config: GPTConfig, folder: Path) -> GPTConfig:
    """The smallest configuration of equal layers into which the model fits; the model's own if its
    layers are equal.

    Raises:
        UserError: zeros would change what the model computes, or no number of heads fits.
    """
    plan = config.quantization
    # Of the linears that read units; a group of scales has this many of their inputs.
    group_size = (
        max((x.weight.group_size for name, x in plan.linears.items() if name != HEAD), default=0)
        if plan
        else 0
    )
    channels = max(config.n_inner)
    if group_size:  # other engines require whole groups
        channels += -channels % group_size
    kv_heads, per_group = _head_numbers(config, folder)
    n = config.n_layer
    shape = replace(
        config,
        n_head=(kv_heads * per_group,) * n,
        kv_heads=(kv_heads,) * n if config.kv_heads else (),
        n_inner=(channels,) * n,
    )
    has_new_heads = shape.widths("heads") != config.widths("heads")
    if config.architecture.norms_whole and has_new_heads:
        raise UserError(
            f"{folder}: its layers differ in width, and a norm of all heads together would count "
            "the zeros that make them equal",
            "prune with Compress.Prune.scope=uniform",
            Code.UNSUPPORTED,
        )
    # New query heads of a group stand before the next group's, whose scales move with them.
    moves = any(queries < per_group for queries in config.per_group)
    if group_size and moves and config.head_dim % group_size:
        raise UserError(
            f"{folder}: the layers' groups of query heads differ in size, and the heads' size "
            f"{config.head_dim} is not a multiple of the scales' group size {group_size}",
            "quantize with another Compress.Quantization.group_size",
            Code.UNSUPPORTED,
        )
    return shape


def _head_numbers(config: GPTConfig, folder: Path) -> tuple[int, int]:
    """(key-value heads, query heads of each) that hold those of every layer."""
    min_kv, min_queries = max(config.n_kv_head), max(config.per_group)
    whole = config.n_embd // config.head_dim
    # The first fit has the fewest query heads in a group, and with these the fewest groups.
    for queries in range(min_queries, config.n_embd + 1):
        for kv in range(min_kv, config.n_embd // queries + 1):
            if config.architecture.has_head_dim:
                fits = config.n_embd % (kv * queries) == 0  # as transformers requires
            else:
                fits = kv * queries == whole
            if fits and (config.kv_heads or queries == 1):
                return kv, queries
    raise UserError(
        f"{folder}: transformers has no model of hidden size {config.n_embd} with {min_kv} "
        f"key-value heads, {min_queries} query heads for each",
        "remove compressed-tensors from Export.formats",
        Code.UNSUPPORTED,
    )


@torch.no_grad()
def padded(model: GPT, folder: Path) -> GPT:
    """The same model in the shape of `uniform`; itself if its layers are equal. Only its weights
    are complete, not the observers of activations: their scales are in the plan."""
    before, after = model.config, uniform(model.config, folder)
    if before == after:
        return model
    wide = GPT(after.with_quantization(None)).eval()
    wide.config = after
    for name, parameter in wide.named_parameters():
        tensor: Tensor = model.get_parameter(name)
        linear = before.architecture.find_linear(name)
        if linear is not None and tensor.shape != parameter.shape:
            layer = int(name.removeprefix(f"{before.architecture.blocks}.").partition(".")[0])
            tensor = _with_zeros(tensor, linear, before, after, layer)
        parameter.copy_(tensor)
    return wide


def _with_zeros(
    tensor: Tensor, linear: Linear, before: GPTConfig, after: GPTConfig, layer: int
) -> Tensor:
    """A linear's weight (out, in) or bias (out,), with zeros for the units that were added."""
    groups = [config.groups(linear, layer) for config in (before, after)]
    widths = [config.layer_widths(layer) for config in (before, after)]
    if linear.style == "column":
        sizes = [[width[part] for part in linear.parts] for width in widths]
        parts = split_rows(tensor, groups[0], sizes[0])
        grown = [_grown(x, groups, (a, b)) for x, a, b in zip(parts, *sizes, strict=True)]
        return join_rows(grown, groups[1])
    return _grown(tensor.T, groups, [width[linear.units] for width in widths]).T


def _grown(rows: Tensor, groups: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Rows (groups[0] * n, ...) of equal groups, as rows (groups[1] * m, ...) with the new ones
    zero, where `sizes` are the numbers of rows."""
    (g, new_groups), (size, new_size) = groups, sizes
    old = rows.reshape(g, size // g, *rows.shape[1:])
    new = rows.new_zeros(new_groups, new_size // new_groups, *rows.shape[1:])
    new[:g, : old.shape[1]] = old
    return new.flatten(0, 1)


def written(model: GPT, folder: Path) -> GPT:
    """The model with layers of equal width; see `padded`."""
    return padded(model, folder)


def write(checkpoint: Checkpoint, folder: Path, dtype: str) -> list[str]:
    """Write the folder `compressed-tensors`; returns the names of its files.

    Args:
        dtype: float32 or float16, for tensors that are not quantized.

    Raises:
        UserError: transformers does not support the model.
    """
    require(checkpoint.model.config, checkpoint.folder)
    model = written(checkpoint.model, checkpoint.folder)
    config = model.config
    target = folder / FOLDER
    target.mkdir()
    family, kind = config.architecture, getattr(torch, dtype)
    tables = {f"{name}.weight" for name in (*config.tables, *family.embeddings)}
    tensors: dict[str, Tensor] = {}
    targets: dict[LinearFormat, list[str]] = {}
    # GPT-NeoX's head is `embed_out` in files, and `lm_head` in transformers.
    ignored = sorted({HEAD, family.stored_name(f"{HEAD}.weight").removesuffix(".weight")})
    for name, tensor in stored_matrices(model):
        stored = family.stored_name(name)
        if isinstance(tensor, IntegerWeight) and name not in tables:
            path = stored.removesuffix(".weight")
            parts = storage(tensor.fmt).to_compressed_tensors(tensor)
            tensors |= {f"{path}.{key}": x for key, x in parts.items()}
            scheme = replace(tensor.fmt, activation_scale=0.0)  # which the linears of one share
            targets.setdefault(scheme, []).append(path)
        else:
            values = tensor.floats if isinstance(tensor, IntegerWeight) else tensor
            tensors[stored] = (values.T if family.is_conv1d(name) else values).to(kind).contiguous()
            if name not in tables and values.dim() > 1:
                ignored.append(stored.removesuffix(".weight"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    more: dict[str, Any] = {}
    if targets:
        # The linears of each format are a group; if all share one, the class names them.
        groups = {}
        for i, (fmt, paths) in enumerate(targets.items()):
            targeted = {"targets": ["Linear"] if len(targets) == 1 else paths}
            groups[f"group_{i}"] = targeted | storage(fmt).compressed_scheme()
        formats = {group["format"] for group in groups.values()}
        more["quantization_config"] = {
            "quant_method": COMPRESSED_TENSORS,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
        }
    write_configuration(checkpoint, config, target, dtype=dtype, **more)
    return sorted(f"{FOLDER}/{file.name}" for file in target.iterdir())


def read(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folder in float32."""
    export_folder = folder / FOLDER
    tensors = load_file(export_folder / "model.safetensors")
    values = read_json(export_folder / "config.json", "export the model again")
    if "quantization_config" in values:
        schemes = read_schemes(values, config.architecture, export_folder)
        tensors = dict(dequantized(tensors, schemes, export_folder))
    for name, tensor in tensors.items():
        parameter = config.architecture.parameter_name(name)
        matrix = tensor.T if config.architecture.is_conv1d(parameter) else tensor
        yield parameter, matrix.float()


def has_zero_points(export_folder: Path) -> bool:
    """Whether a folder `compressed-tensors` has weights with zero points."""
    values = read_json(export_folder / "config.json", "export the model again")
    groups = values.get("quantization_config", {}).get("config_groups", {}).values()
    return any(not group["weights"]["symmetric"] for group in groups)


def with_float_inputs(model: GPT) -> GPT:
    """The model as the format's engines compute it: without the rounding of activations that the
    format keeps in float, those with scales in groups; itself if there are none."""
    plan = model.config.quantization
    if plan is None:
        return model
    linears = {
        name: fmt
        if storage(fmt).compressed_scheme()["input_activations"]
        else replace(fmt, activation=None)
        for name, fmt in plan.linears.items()
    }
    if linears == plan.linears:
        return model
    floats = GPT(model.config.with_quantization(None))
    for name, parameter in floats.named_parameters():
        parameter.data.copy_(model.get_parameter(name).data)
    kept = QuantizationPlan(linears, plan.position_embedding)
    fake_quant.insert(floats, kept)
    floats.config = model.config.with_quantization(kept)
    return floats.eval()


def write_configuration(
    checkpoint: Checkpoint, config: GPTConfig, target: Path, **more: Any
) -> None:
    """Write configuration, tokenizer, end-of-text tokens, sampling parameters and chat template in
    Hugging Face's format.

    Args:
        config: that of the weights, whose layers are equal.
        more: further keys of `config.json`.
    """
    described = config.with_quantization(None).to_json()
    del described["lathe"]
    _write_json(target / "config.json", described | more)
    save_tokenizer(checkpoint.tokenizer, target / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": checkpoint.tokenizer.id_to_token(checkpoint.end_ids[-1]),
        "model_max_length": config.n_positions,
    }
    if config.chat_template:
        settings["chat_template"] = config.chat_template
    _write_json(target / "tokenizer_config.json", settings)
    generation = {"eos_token_id": list(checkpoint.end_ids), **config.sampling.to_json()}
    _write_json(target / GENERATION, generation)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
