"""Exported graphs of families other than GPT-2 compute the same as the checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.export.export import export
from lathe.export.proof import ProofError
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig, read_config
from lathe.model.gpt import GPT
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import ExportSettings, Recipe
from lathe_base.config.settings.types import Bits
from lathe_base.errors import Code
from lathe_serving.runtime.open_model import open_model
from lathe_serving.runtime.session import OnnxModel
from tests.support.cpu import WITHOUT_VNNI
from tests.support.errors import raises
from tests.support.families import CASES, TOKENS, in_turn, make, quantized, save
from tests.support.small_export import write_held_out
from tests.support.small_run import SMALL

SETTINGS = ExportSettings(prompts=4, new_tokens=12)


def pruned_config(config: GPTConfig) -> GPTConfig:
    """Config whose layers differ in groups, query heads per group, and channels."""
    values = config.to_json()
    values["lathe"] |= {"n_head": [4, 1, 2], "n_kv_head": [2, 1, 2], "n_inner": [80, 24, 64]}
    return GPTConfig.from_json(values)


def save_family(case: str, path: Path, tokenizer: Tokenizer) -> Path:
    name, changes = CASES[case]
    return save(make(name, **changes), path / "hf", tokenizer)


@pytest.mark.parametrize(
    ("case", "flavour"),
    in_turn("fp32", "fp16", "int8", "dynamic int8", "int4", "int8 cache"),
)
def test_export_is_proven(
    case: str, flavour: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    source = save_family(case, tmp_path, byte_tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(source).eval()
    if "int" in flavour:
        groups: dict[str, tuple[int, Bits]] = {"int4": (32, 4)}
        groups |= dict.fromkeys(("dynamic int8", "int8 cache"), (32, 8))
        parent, int8_cache = load_checkpoint(source).model, flavour == "int8 cache"
        model = quantized(parent, *groups.get(flavour, (0, 8)), int8_cache)
        save_checkpoint(tmp_path / "q", model, byte_tokenizer, "quantize", Recipe())
        source = tmp_path / "q"
    dtype = "float16" if flavour == "fp16" else "float32"
    recipe = Recipe(Export=SETTINGS.model_copy(update={"dtype": dtype}))
    result = export(recipe, source, write_held_out(tmp_path / "data"), tmp_path / "onnx")
    assert result.flavour == flavour.removeprefix("dynamic ").removesuffix(" cache")
    linears = 4 * 3 + 1
    assert result.integer_kernels == (linears if "int" in flavour else 0)
    found = OnnxModel(tmp_path / "onnx", threads=1)
    n_kv_head = getattr(theirs.config, "num_key_value_heads", theirs.config.num_attention_heads)
    assert found.n_kv_head == [n_kv_head] * 3
    if flavour == "fp32":  # against transformers itself, with a cache too
        with torch.inference_mode():
            expected = theirs(TOKENS).logits.numpy()
        np.testing.assert_allclose(found.logits(TOKENS.numpy()), expected, atol=2e-5)
        cache = found.start(4)
        found.step(cache, TOKENS.numpy()[:, :30])
        for i in range(30, 40):
            last = found.step(cache, TOKENS.numpy()[:, i : i + 1])
        np.testing.assert_allclose(last, expected[:, -1], atol=2e-5)
    if flavour in ("fp32", "int8", "int4"):
        check_openvino(found, tmp_path / "onnx", flavour)


def check_openvino(own: OnnxModel, folder: Path, flavour: str) -> None:
    """Check that OpenVINO computes the same, or rejects the export."""
    if flavour == "int8" and WITHOUT_VNNI:
        with raises(Code.NOT_PROVED, folder, "OpenVINO"):
            open_model(folder, threads=1, runtime="openvino")
        return
    other = open_model(folder, threads=1, runtime="openvino").model  # checks the error limit
    if flavour == "fp32":
        tokens = TOKENS[:1].numpy()
        np.testing.assert_allclose(other.logits(tokens), own.logits(tokens), atol=1e-5)


@pytest.mark.parametrize("flavour", ["fp32", "int8"])
def test_a_pruned_model_is_exported(
    flavour: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    config = pruned_config(
        load_checkpoint(save_family("qwen3", tmp_path, byte_tokenizer)).model.config
    )
    model = GPT(config)
    model.initialize(0.1, seed=2)
    if flavour == "int8":
        model = quantized(model)
    save_checkpoint(tmp_path / "p", model, byte_tokenizer, "prune", Recipe())
    data = write_held_out(tmp_path / "data")
    export(Recipe(Export=SETTINGS), tmp_path / "p", data, tmp_path / "onnx")
    metadata = json.loads((tmp_path / "onnx" / "export.json").read_text())
    assert (metadata["n_head"], metadata["n_kv_head"]) == ([4, 1, 2], [2, 1, 2])
    assert metadata["opset"] == 23


@pytest.mark.parametrize(
    ("name", "factor"),
    [("frequencies", 1.01), ("model.norm.weight", 1.01), ("q_norm.weight", 1.05)],
)
def test_the_proof_notices_a_wrong_graph(
    name: str,
    factor: float,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lathe.export.graph import Graph

    original = Graph.initializers

    def spoiled(self: Graph) -> Any:
        for found, value in original(self):
            yield found, value * np.float32(factor) if f"model.{found}".endswith(name) else value

    monkeypatch.setattr(Graph, "initializers", spoiled)
    source, data = save_family("qwen3", tmp_path, byte_tokenizer), write_held_out(tmp_path / "data")
    with raises(Code.NOT_PROVED, kind=ProofError):
        export(Recipe(Export=SETTINGS), source, data, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_one_attention_and_one_product_for_what_reads_the_same(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    source = save_family("llama", tmp_path, byte_tokenizer)
    export(Recipe(Export=SETTINGS), source, write_held_out(tmp_path / "d"), tmp_path / "onnx")
    graph = onnx.load(tmp_path / "onnx" / "model.onnx").graph
    products = [node.name for node in graph.node if node.op_type == "MatMul"]
    assert len(products) == 4 * 3 + 1 and "layers.0.self_attn.qkv_proj" in products
    attention = next(node for node in graph.node if node.name == "layers.1.self_attn")
    (branch,) = (a.g for a in attention.attribute if a.name == "else_branch")
    (node,) = (n for n in branch.node if n.op_type == "GroupQueryAttention")
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert found == {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "scale": 0.25}


def test_a_chat_model_keeps_template_and_ends(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Hugging Face stores these in separate files."""
    source = save_family("llama", tmp_path, byte_tokenizer)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    export(Recipe(Export=SETTINGS), source, write_held_out(tmp_path / "data"), tmp_path / "onnx")
    exported = read_config(tmp_path / "onnx")
    assert exported == read_config(source)
    assert exported.chat_template == "{{ messages[0].content }}" and exported.end_ids == (2, 5)
    metadata = json.loads((tmp_path / "onnx" / "export.json").read_text())
    assert {2, 5} <= set(metadata["end_ids"])


def test_a_chat_template_that_renders_no_chat_is_refused_before_the_export(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    source = save_family("llama", tmp_path, byte_tokenizer)
    (source / "chat_template.jinja").write_text("{{ raise_exception('ask a tool') }}")
    with raises(Code.MALFORMED, f"{source}: ", "ask a tool", "chat_template.jinja"):
        export(Recipe(Export=SETTINGS), source, write_held_out(tmp_path / "d"), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_rotary_tables_are_not_in_the_file(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """The weights take 0.5 MB; tables for 131,072 positions would take 8 MB."""
    theirs = make("llama", head_dim=16, max_position_embeddings=131_072)
    source = save(theirs, tmp_path / "hf", byte_tokenizer)
    result = export(
        Recipe(Export=SETTINGS), source, write_held_out(tmp_path / "data"), tmp_path / "onnx"
    )
    assert result.n_bytes < 700_000
    opened = OnnxModel(tmp_path / "onnx", threads=1)
    cache = opened.start(1, 131_072)  # at late positions, where angles are large
    cache.lengths[:] = 130_000
    found = opened.step(cache, TOKENS.numpy()[:1, :1])
    past = torch.zeros(1, 2, 130_000, 16)
    before = DynamicCache()
    for layer in range(3):
        before.update(past, past, layer)
    with torch.inference_mode():
        expected = theirs(TOKENS[:1, :1], past_key_values=before).logits[0, -1:].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)


WHOLE_WAY = {
    "gemma3_text": ("Model.num_layers=6", "Model.num_key_value_heads=2", "Model.sliding_window=9"),
    **dict.fromkeys(("olmo2", "starcoder2"), ("Model.num_key_value_heads=2",)),
    **dict.fromkeys(
        ("qwen3", "smollm3", "phi3"), ("Model.num_key_value_heads=2", "Model.sliding_window=9")
    ),
    **dict.fromkeys(("gpt_neox", "opt"), ()),
}


IN_CI = ("gemma3_text", "phi3", "opt")
"""Norms, projections and positions of each kind; each family has quick tests of every step."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow if x in IN_CI else pytest.mark.long)
        for x in WHOLE_WAY
    ],
)
def test_a_family_goes_the_whole_way(name: str, small_data: Path, tmp_path: Path) -> None:
    """Train, prune, quantize, export with verification, and run in the runtimes for this CPU."""
    changes = (
        *SMALL,
        *WHOLE_WAY[name],
        f"Model.architecture={name}",
        "Engine.max_steps=8",
        "Compress.Prune.ratio=0.25",
        "Compress.Prune.scope=global",
        "Compress.Prune.criterion=taylor",
        "Compress.Quantization.quantize_embedding=True",
        "Export.prompts=4",
        "Export.new_tokens=8",
    )
    recipe = load_recipe("tiny", changes)
    dense, pruned, int8, onnx_ = (tmp_path / x for x in ("dense", "pruned", "int8", "onnx"))
    pretrain(recipe, small_data, dense)
    prune(recipe, dense, small_data, pruned)
    quantize(recipe, pruned, small_data, int8)
    result = export(recipe, int8, small_data, onnx_)
    assert result.flavour == "int8" and result.integer_kernels
    shape = read_config(onnx_)
    assert shape.n_params < read_config(dense).n_params
    assert shape.kinds == read_config(dense).kinds
    for runtime in ("onnxruntime",) if WITHOUT_VNNI else ("onnxruntime", "openvino"):
        opened = open_model(onnx_, threads=1, runtime=runtime)  # checks the error limit
        assert opened.model.runtime == runtime
        texts = opened.model.greedy([TOKENS[0, :7].tolist(), TOKENS[1, :12].tolist()], 8)
        assert all(texts)
