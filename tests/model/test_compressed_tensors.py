"""Importing compressed-tensors folders, written with the package, as float checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from lathe.model.checkpoint import HFTensors, load_checkpoint
from lathe.model.compressed_tensors import import_compressed_tensors
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from tests.support.families import make, save

SCHEMES: dict[str, dict[str, Any]] = {
    "4 bits, groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "4 bits, groups, asymmetric": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 32,
        "symmetric": False,
    },
    "8 bits, groups": {"num_bits": 8, "strategy": "group", "group_size": 16},
    "8 bits, rows, packed": {"num_bits": 8, "strategy": "channel"},
    "8 bits, rows": {"num_bits": 8, "strategy": "channel", "packed": False},
    "8 bits, tensor": {"num_bits": 8, "strategy": "tensor", "packed": False},
}


def compressed(folder: Path, tokenizer: Tokenizer, name: str) -> dict[str, Tensor]:
    """Write a Qwen3 model with compressed linears; returns the package's decompressed weights."""
    arguments = dict(SCHEMES[name])
    is_packed = arguments.pop("packed", True)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    method: Any = PackedQuantizationCompressor if is_packed else IntQuantizationCompressor
    model = make("qwen3", hidden_size=64, intermediate_size=96, vocab_size=304, head_dim=16)
    save(model, folder, tokenizer)
    stored, expected = load_file(folder / "model.safetensors"), {}
    for key, weight in list(stored.items()):
        if not key.endswith("_proj.weight"):
            continue
        path = key.removesuffix(".weight")
        size = {"group": arguments.get("group_size"), "channel": weight.shape[1]}
        columns = size.get(arguments["strategy"])
        apart = weight.reshape(len(weight), -1, columns) if columns else weight.reshape(1, 1, -1)
        scale = apart.abs().amax(-1) / (2 ** (arguments["num_bits"] - 1) - 0.5)
        given = {"weight": weight, "weight_scale": scale if columns else scale.reshape(1)}
        if not arguments.get("symmetric", True):
            given["weight_zero_point"] = torch.randint(-3, 4, scale.shape).to(torch.int8)
        found = method.compress(given, scheme)
        expected[key] = method.decompress(dict(found), scheme)["weight"]
        del stored[key]
        stored |= {f"{path}.{part}": tensor.contiguous() for part, tensor in found.items()}
        stored[f"{path}.input_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    form = "pack-quantized" if is_packed else "int-quantized"
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": form}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("name", SCHEMES)
def test_the_weights_are_those_that_the_package_reads(
    name: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    expected = compressed(tmp_path / "given", byte_tokenizer, name)
    import_compressed_tensors(Recipe(), tmp_path / "given", tmp_path / "made")
    found = HFTensors(load_checkpoint(tmp_path / "made").model)
    assert len(expected) == 3 * 7
    for key, value in expected.items():
        own = found[key.removeprefix("model.")]
        torch.testing.assert_close(own, value.float(), rtol=1e-6, atol=1e-7, msg=key)


MISTAKES = {
    "another method": ("config", {"quant_method": "gptq"}, "quant_method is 'gptq'"),
    "floats": (
        "config",
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "format is 'float-quantized'",
    ),
    "no scale": ("weight_scale", None, "has no weight_scale"),
    "other rows": ("weight_shape", torch.tensor([60, 64]), "integers"),
    "other columns": ("weight_shape", torch.tensor([64, 60]), "given/.*does not fit config.json"),
    "another scale": ("weight_scale", torch.ones(7, 2), "do not fit"),
    "an order": ("weight_g_idx", torch.arange(64), "weight_g_idx"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    where, value, message = MISTAKES[name]
    folder = tmp_path / "given"
    compressed(folder, byte_tokenizer, "4 bits, groups")
    if where == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    else:
        tensors = load_file(folder / "model.safetensors")
        key = f"model.layers.1.self_attn.q_proj.{where}"
        tensors.pop(key, None)
        if isinstance(value, Tensor):
            tensors[key] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message):
        import_compressed_tensors(Recipe(), folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()
