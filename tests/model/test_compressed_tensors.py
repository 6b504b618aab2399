"""Importing compressed-tensors folders, written with the package, as float checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from lathe.model.checkpoint import HFTensors, load_checkpoint
from lathe.model.compressed_tensors import import_compressed_tensors
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
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
    described = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized" if is_packed else "int-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    config["quantization_config"] = described.model_dump(mode="json")
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


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def change_weights(folder: Path, **values: Any) -> None:
    """Change arguments of the weights of `group_0` in `config.json`."""
    change_config(folder, lambda c: c["config_groups"]["group_0"]["weights"].update(values))


def test_targets_and_ignore_decide_the_scheme_of_each_linear(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """A path counts before an expression, an expression before a class."""
    folder = tmp_path / "given"
    expected = compressed(folder, byte_tokenizer, "4 bits, groups")
    plain = "model.layers.2.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    for key in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{plain}.{key}"]
    tensors[f"{plain}.weight"] = expected[f"{plain}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def change(config: dict[str, Any]) -> None:
        groups = config["config_groups"]
        other = json.loads(json.dumps(groups["group_0"]))
        other["weights"]["num_bits"] = 8
        groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
        groups["group_0"]["targets"] = ["re:.*_proj$", "model.layers.0.mlp.up_proj"]
        groups["group_1"] = other | {"targets": ["Linear"]}
        config["ignore"] = ["lm_head", "re:.*layers.2.mlp.down"]

    change_config(folder, change)
    import_compressed_tensors(Recipe(), folder, tmp_path / "made")
    found = HFTensors(load_checkpoint(tmp_path / "made").model)
    for key, value in expected.items():
        own = found[key.removeprefix("model.")]
        torch.testing.assert_close(own, value.float(), rtol=1e-6, atol=1e-7, msg=key)


Change = Callable[[Path], None]
DISAGREEMENTS: dict[str, tuple[str, Change, Code, list[str]]] = {
    "8 bits over 4": (
        "4 bits, groups",
        lambda x: change_weights(x, num_bits=8),
        Code.MISMATCH,
        ["weight_packed is (", "group_0 of config_groups (8 bits"],
    ),
    "another group size": (
        "4 bits, groups",
        lambda x: change_weights(x, group_size=16),
        Code.MISMATCH,
        ["weight_scale is (64, 3)", "group_0", "group of 16", "(64, 6)"],
    ),
    "a group size that does not divide": (
        "4 bits, groups",
        lambda x: change_weights(x, group_size=40),
        Code.MISMATCH,
        ["96 inputs of ", "group size 40"],
    ),
    "rows in place of groups": (
        "4 bits, groups",
        lambda x: change_weights(x, strategy="channel", group_size=None),
        Code.MISMATCH,
        ["weight_scale is ", "a scale for each channel"],
    ),
    "symmetric": (
        "4 bits, groups, asymmetric",
        lambda x: change_weights(x, symmetric=True),
        Code.MISMATCH,
        ["weight_zero_point is not zero", "(symmetric)"],
    ),
    "asymmetric": (
        "4 bits, groups",
        lambda x: change_weights(x, symmetric=False),
        Code.INCOMPLETE,
        ["weight_zero_point", "group_0"],
    ),
    "4 bits over int8": (
        "8 bits, rows",
        lambda x: change_weights(x, num_bits=4),
        Code.MISMATCH,
        ["weight has integers from -1", " to 1", "group_0"],
    ),
    "float weights": (
        "8 bits, rows",
        lambda x: change_weights(x, type="float"),
        Code.UNSUPPORTED,
        ["type of the weights of group_0 is 'float'"],
    ),
    "3 bits": (
        "8 bits, rows",
        lambda x: change_weights(x, num_bits=3),
        Code.UNSUPPORTED,
        ["num_bits of the weights of group_0 is 3"],
    ),
    "blocks": (
        "8 bits, rows",
        lambda x: change_weights(x, strategy="block"),
        Code.UNSUPPORTED,
        ["strategy of the weights of group_0 is 'block'"],
    ),
    "an ignored linear with integers": (
        "8 bits, rows",
        lambda x: change_config(x, lambda c: c["ignore"].append("re:.*layers.1.*k_proj")),
        Code.MISMATCH,
        ["layers.1.self_attn.k_proj", "ignore"],
    ),
    "a targeted linear without": (
        "8 bits, rows",
        lambda x: change_config(x, lambda c: c.update(ignore=[])),
        Code.MISMATCH,
        ["lm_head.weight is float32", "group_0", "8 bits"],
    ),
    "no groups": (
        "8 bits, rows",
        lambda x: change_config(x, lambda c: c.pop("config_groups")),
        Code.MALFORMED,
        ["config_groups"],
    ),
    "no expression": (
        "8 bits, rows",
        lambda x: change_config(x, lambda c: c["ignore"].append("re:(")),
        Code.MALFORMED,
        ["'re:('"],
    ),
    "online rotations": (
        "8 bits, rows",
        lambda x: change_config(x, lambda c: c.update(transform_config=ROTATIONS)),
        Code.UNSUPPORTED,
        ["transform_config", "(R3)"],
    ),
}
ROTATIONS = TransformConfig(
    config_groups={
        "R3": TransformScheme(
            type="hadamard", apply=[TransformArgs(targets="Linear", location="input")]
        )
    }
).model_dump(mode="json")


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_tensors_that_disagree_with_config_groups_are_refused_by_name(
    name: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    scheme, change, code, texts = DISAGREEMENTS[name]
    compressed(tmp_path / "given", byte_tokenizer, scheme)
    change(tmp_path / "given")
    with raises(code, *texts):
        import_compressed_tensors(Recipe(), tmp_path / "given", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.content }}", "invalid"),
        ("{{ messages[0].content[0].text.strip() }}", "has no attribute"),
        (
            "{% if tools %}{{ tools }}{% endif %}",
            "empty prompt, in a chat of three turns",
        ),
    ],
)
def test_a_chat_template_that_renders_no_chat_is_refused(
    template: str, text: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "given"
    compressed(folder, byte_tokenizer, "8 bits, rows")
    (folder / "chat_template.jinja").write_text(template)
    with raises(Code.MALFORMED, "given: the", text):
        import_compressed_tensors(Recipe(), folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_scales_of_the_kv_cache_are_dropped_with_a_warning(
    tmp_path: Path, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "given"
    compressed(folder, byte_tokenizer, "8 bits, rows")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.endswith("input_scale")}
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor").model_dump(mode="json")
    change_config(folder, lambda c: c.update(kv_cache_scheme=scheme))
    import_compressed_tensors(Recipe(), folder, tmp_path / "made")
    assert (tmp_path / "made").exists()
    assert "dropping 2 scales" in caplog.text and "self_attn.k_scale" in caplog.text


MISTAKES = {
    "another method": (
        "config",
        {"quant_method": "gptq"},
        Code.UNSUPPORTED,
        ["quant_method is 'gptq'"],
    ),
    "floats": (
        "config",
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        Code.UNSUPPORTED,
        ["format is 'float-quantized'"],
    ),
    "no scale": ("weight_scale", None, Code.INCOMPLETE, ["no weight_scale"]),
    "other rows": (
        "weight_shape",
        torch.tensor([60, 64]),
        Code.MISMATCH,
        ["q_proj.weight_scale is"],
    ),
    "other columns": (
        "weight_shape",
        torch.tensor([64, 60]),
        Code.MISMATCH,
        ["60 inputs of ", "q_proj"],
    ),
    "fewer columns": (
        "weight_shape",
        torch.tensor([64, 32]),
        Code.MISMATCH,
        ["q_proj.weight_scale is"],
    ),
    "another scale": (
        "weight_scale",
        torch.ones(7, 2),
        Code.MISMATCH,
        ["q_proj.weight_scale is (7, 2)"],
    ),
    "no integers": ("weight_packed", None, Code.INCOMPLETE, ["q_proj has weight_s"]),
    "an order": ("weight_g_idx", torch.arange(64), Code.UNSUPPORTED, ["weight_g_idx"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    where, value, code, texts = MISTAKES[name]
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
    with raises(code, *texts):
        import_compressed_tensors(Recipe(), folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()
