"""Converts folders in the compressed-tensors format (vLLM, llm-compressor) to float checkpoints.

A quantized linear has integers, as `weight` (int8) or packed into int32 as `weight_packed`, with
`weight_scale` and perhaps `weight_zero_point`, with one scale per tensor, per row or per group of
inputs. Weights are dequantized; activation scales are dropped.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import WEIGHTS, weight_files
from lathe_base.artifacts.kinds import CHECKPOINT, read_json
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
WORD = 32
"""Bits of the integers into which weights are packed."""
KEYS = {"weight_scale", "weight_zero_point", "weight_shape", "weight_packed", "weight_g_idx"}
INPUTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
HINT = "copy the folder again"


@attested("import", "source")
def import_compressed_tensors(recipe: Recipe, source: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder, with float32 weights, from a folder of compressed-tensors.

    Raises:
        UserError: another kind of quantization, inconsistent tensors, or a model that
            `load_checkpoint` rejects.
    """
    claim_output_folder(output, CHECKPOINT, source)
    values = read_json(source / "config.json", "give the folder of a Hugging Face model")
    _require_method(values, source)
    del values["quantization_config"]
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not safetensors: {error}", HINT) from None
    with TemporaryDirectory(prefix="lathe-import-") as folder:
        plain = Path(folder)
        for path in source.iterdir():  # tokenizer, chat template, ends of a text
            if path.is_file() and path.suffix != ".safetensors" and "index" not in path.name:
                shutil.copyfile(path, plain / path.name)
        (plain / "config.json").write_text(json.dumps(values), encoding="utf-8")
        save_file(dict(dequantized(tensors, source)), plain / WEIGHTS, {"format": "pt"})
        try:
            checkpoint = load_checkpoint(plain)
        except UserError as error:
            raise UserError(error.what.replace(str(plain), str(source)), error.hint) from error
        with atomic_folder(output, CHECKPOINT) as work:
            save_checkpoint(work, checkpoint.model, checkpoint.tokenizer, "import", recipe)
    return checkpoint.model.config


def _require_method(values: Mapping[str, Any], source: Path) -> None:
    """Raise UserError unless the folder has integer weights in the compressed-tensors format."""
    found = values.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method != METHOD:
        raise UserError(
            f"{source}: quant_method is {method!r}, but Lathe imports {METHOD} only",
            "pass an ordinary checkpoint folder directly to the command that needs it",
        )
    assert isinstance(found, dict)
    if found.get("format") not in FORMATS:
        raise UserError(
            f"{source}: format is {found.get('format')!r}, not one of {', '.join(FORMATS)}",
            "give a folder with integer weights",
        )


def dequantized(tensors: Mapping[str, Tensor], source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors by the names of a plain Hugging Face file.

    Raises:
        UserError: integers without a scale, of a shape that does not fit them, or in an order of
            their own (`weight_g_idx`).
    """
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        own = {key: tensors.get(f"{path}.{key}") for key in KEYS}
        if kind in INPUTS or (kind in KEYS and kind != "weight_packed"):
            continue
        if kind != "weight_packed" and not (kind == "weight" and tensor.dtype == torch.int8):
            yield name, tensor
            continue
        scale = own["weight_scale"]
        if scale is None or own["weight_g_idx"] is not None:
            what = "has no weight_scale" if scale is None else "has weight_g_idx"
            raise UserError(
                f"{source}: {path} {what}",
                HINT
                if scale is None
                else "save it again with actorder=static or without activation ordering",
            )
        values, zero = tensor, own["weight_zero_point"]
        if kind == "weight_packed":
            shape = own["weight_shape"]
            if shape is None or shape.numel() != 2:
                raise UserError(f"{source}: {path} has no weight_shape of two numbers", HINT)
            rows, columns = shape.tolist()
            bits = WORD * tensor.shape[1] // max(1, columns)
            if tensor.shape[0] != rows or bits not in (4, 8):
                raise UserError(
                    f"{source}: {name} is {tuple(tensor.shape)}, which holds {bits} bits for each "
                    f"of {rows} x {columns} integers",
                    HINT if bits in (4, 8) else "give a folder with weights of 4 or 8 bits",
                )
            values = unpacked(tensor, bits)[:, :columns]
            if zero is not None:
                zero = unpacked(zero.T, bits).T[:rows]
        yield f"{path}.weight", _float(values, scale, zero, f"{source}: {path}")


def _float(values: Tensor, scale: Tensor, zero: Tensor | None, where: str) -> Tensor:
    """Integers (O, I) with scales (), (1), (O, 1) or (O, groups) -> (O, I) in float32."""
    rows, columns = values.shape
    scales = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    if len(scales) not in (1, rows) or columns % scales.shape[1]:
        raise UserError(f"{where}: scales {tuple(scale.shape)} do not fit {rows} x {columns}", HINT)
    size = columns // scales.shape[1]
    offset = 0 if zero is None else zero.reshape(scales.shape).repeat_interleave(size, 1).float()
    return (values.float() - offset) * scales.repeat_interleave(size, 1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words into integers (O, words * 32 / bits): the first one is in the lowest bits,
    and 2 ** (bits - 1) is added to each."""
    apart = words[..., None].long() >> torch.arange(0, WORD, bits)
    values: Tensor = (apart & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
    return values
