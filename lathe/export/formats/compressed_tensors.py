"""compressed-tensors: a Hugging Face folder that vLLM, SGLang and transformers read.

Weights keep their integers. Static INT8 activations keep their scale (W8A8). Activations that Lathe
quantizes dynamically in groups stay in float (W8A16, W4A16), which the format's engines support,
and which is closer to the float model. The token embedding and the head are dequantized to float16,
because engines do not look up integer rows.

Source of the layout: the package `compressed-tensors`, `compressors/pack_quantized` and
`quantization/quant_config.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.data.tokenizer import save_tokenizer
from lathe.export.formats.integers import Integers, stored_matrices
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint
from lathe.model.compressed_schemes import METHOD, read_schemes
from lathe.model.compressed_tensors import WORD, dequantized
from lathe.model.config import GPTConfig
from lathe.model.quantization import LinearFormat
from lathe_base.artifacts.kinds import read_json
from lathe_base.artifacts.sampling import GENERATION
from lathe_base.errors import UserError

ENGINE = "transformers"
FOLDER = METHOD
STRATEGIES = {"abs_max": "tensor", "channel_wise_abs_max": "channel", "group_wise": "group"}


def require(config: GPTConfig, folder: Path) -> None:
    """Raise UserError for a model that transformers and vLLM do not support."""
    hint = "remove compressed-tensors from Export.formats"
    family = config.architecture
    if config.prefix_tokens:
        raise UserError(
            f"{folder}: has a prefix of {config.n_prefix} tokens, which transformers does not "
            "compute",
            "quantize its parent with Compress.Quantization.prefix=none",
        )
    if not config.is_uniform:
        raise UserError(
            f"{folder}: its layers differ in width, which transformers does not support",
            f"prune with Compress.Prune.scope=uniform, or {hint}",
        )
    if family.transposed:
        raise UserError(
            f"{folder}: is a {family.title} model, whose Conv1D layers compressed-tensors cannot "
            "quantize",
            hint,
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
            )


def write(checkpoint: Checkpoint, folder: Path, dtype: str) -> list[str]:
    """Write the folder `compressed-tensors`; returns the names of its files.

    Args:
        dtype: float32 or float16, for tensors that are not quantized.

    Raises:
        UserError: transformers does not support the model.
    """
    config = checkpoint.model.config
    require(config, checkpoint.folder)
    target = folder / FOLDER
    target.mkdir()
    family, kind = config.architecture, getattr(torch, dtype)
    tables = {f"{name}.weight" for name in (*config.tables, *family.embeddings)}
    tensors: dict[str, Tensor] = {}
    targets: dict[LinearFormat, list[str]] = {}
    # GPT-NeoX's head is `embed_out` in files, and `lm_head` in transformers.
    ignored = sorted({HEAD, family.stored_name(f"{HEAD}.weight").removesuffix(".weight")})
    for name, tensor in stored_matrices(checkpoint.model):
        stored = family.stored_name(name)
        if isinstance(tensor, Integers) and name not in tables:
            path = stored.removesuffix(".weight")
            tensors |= {f"{path}.{key}": x for key, x in _tensors(tensor).items()}
            scheme = _without_scale(tensor.fmt)
            targets.setdefault(scheme, []).append(path)
        else:
            values = tensor.floats if isinstance(tensor, Integers) else tensor
            tensors[stored] = values.to(kind).contiguous()
            if name not in tables and values.dim() > 1:
                ignored.append(stored.removesuffix(".weight"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    more = {"quantization_config": _quantization_config(targets, ignored)} if targets else {}
    write_configuration(checkpoint, target, dtype=dtype, **more)
    return sorted(f"{FOLDER}/{file.name}" for file in target.iterdir())


def _without_scale(fmt: LinearFormat) -> LinearFormat:
    """A format without its scale, which the linears of one scheme share."""
    return LinearFormat(fmt.weight, fmt.activation)


def _tensors(matrix: Integers) -> dict[str, Tensor]:
    """The tensors of one linear, by the last part of their names."""
    scales = matrix.scales
    if matrix.fmt.weight.quantize_type == "abs_max":
        scales = scales[:1, 0]
    if matrix.fmt.activation == "int8":
        scale = torch.tensor([matrix.fmt.activation_scale])
        return {"weight": matrix.values, "weight_scale": scales, "input_scale": scale}
    return {
        "weight_packed": packed(matrix.values, matrix.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.values.shape),
    }


def packed(values: Tensor, bits: int) -> Tensor:
    """Pack integers (O, I) of 4 or 8 bits into int32, 32 / bits per word, the first in the lowest
    bits."""
    per_word = WORD // bits
    unsigned = values.long() + 2 ** (bits - 1)
    apart = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word))
    words = apart.view(len(values), -1, per_word) << torch.arange(0, WORD, bits)
    joined: Tensor = words.sum(-1).to(torch.int32)
    return joined


def read(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folder in float32."""
    export_folder = folder / FOLDER
    tensors = load_file(export_folder / "model.safetensors")
    values = read_json(export_folder / "config.json", "export the model again")
    if "quantization_config" in values:
        schemes = read_schemes(values, config.architecture, export_folder)
        tensors = dict(dequantized(tensors, schemes, export_folder))
    for name, tensor in tensors.items():
        yield config.architecture.parameter_name(name), tensor.float()


def _quantization_config(
    targets: dict[LinearFormat, list[str]], ignored: list[str]
) -> dict[str, Any]:
    """The quantization key of `config.json`."""
    groups = {}
    for i, (fmt, paths) in enumerate(targets.items()):
        weight = fmt.weight
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(targets) == 1 else paths,
            "format": "int-quantized" if fmt.activation == "int8" else "pack-quantized",
            "weights": _arguments(
                weight.bits,
                STRATEGIES[weight.quantize_type],
                **({"group_size": weight.group_size} if weight.group_size else {}),
            ),
            "input_activations": _arguments(8, "tensor") if fmt.activation == "int8" else None,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    }


def _arguments(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
    }


def write_configuration(checkpoint: Checkpoint, target: Path, **more: Any) -> None:
    """Write configuration, tokenizer, end-of-text tokens, sampling parameters and chat template in
    Hugging Face's format.

    Args:
        more: further keys of `config.json`.
    """
    config = checkpoint.model.config
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
