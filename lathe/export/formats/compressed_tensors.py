"""compressed-tensors: a Hugging Face folder that vLLM, SGLang and transformers read.

Weights keep their integers. Static INT8 activations keep their scale (W8A8). Activations that Lathe
quantizes dynamically in groups stay in float (W8A16, W4A16), which the format's engines support,
and which is closer to the float model. Layers that differ in width are padded with zeros
(`lathe.export.uniform`). The token embedding and the head are dequantized to float16,
because engines do not look up integer rows.

Source of the layout: the package `compressed-tensors`, `compressors/pack_quantized` and
`quantization/quant_config.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.data.tokenizer import save_tokenizer
from lathe.export import weight_formats
from lathe.export.uniform import padded, uniform
from lathe.export.weight_formats import compressed_scheme, stored_matrices
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint
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


def written(model: GPT, folder: Path) -> GPT:
    """The model with layers of equal width; see `lathe.export.uniform`."""
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
            parts = weight_formats.compressed_tensors(tensor)
            tensors |= {f"{path}.{key}": x for key, x in parts.items()}
            scheme = replace(tensor.fmt, activation_scale=0.0)  # which the linears of one share
            targets.setdefault(scheme, []).append(path)
        else:
            values = tensor.floats if isinstance(tensor, IntegerWeight) else tensor
            tensors[stored] = (values.T if family.is_conv1d(name) else values).to(kind).contiguous()
            if name not in tables and values.dim() > 1:
                ignored.append(stored.removesuffix(".weight"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    more = {"quantization_config": _quantization_config(targets, ignored)} if targets else {}
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
    """The model as the format's engines compute it: without the rounding of activations that are
    quantized dynamically; itself if there are none."""
    plan = model.config.quantization
    if plan is None or all(fmt.activation != "dynamic_int8" for fmt in plan.linears.values()):
        return model
    linears = {
        name: replace(fmt, activation=None) if fmt.activation == "dynamic_int8" else fmt
        for name, fmt in plan.linears.items()
    }
    floats = GPT(model.config.with_quantization(None))
    for name, parameter in floats.named_parameters():
        parameter.data.copy_(model.get_parameter(name).data)
    kept = QuantizationPlan(linears, plan.position_embedding)
    fake_quant.insert(floats, kept)
    floats.config = model.config.with_quantization(kept)
    return floats.eval()


def _quantization_config(
    targets: dict[LinearFormat, list[str]], ignored: list[str]
) -> dict[str, Any]:
    """The quantization key of `config.json`."""
    groups = {}
    for i, (fmt, paths) in enumerate(targets.items()):
        targeted = {"targets": ["Linear"] if len(targets) == 1 else paths}
        groups[f"group_{i}"] = targeted | compressed_scheme(fmt)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    }


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
