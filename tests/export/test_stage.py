import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tokenizers import Tokenizer

from lathe.errors import UserError
from lathe.export.proof import ProofError, _compare_greedy, count_kernels, prove
from lathe.export.stage import export
from lathe.model.checkpoint import checkpoint_digest
from lathe.model.config import GPTConfig
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.serve.session import OnnxModel
from lathe.settings import ExportSettings, GenerationSettings, Recipe
from lathe.storage import sha256
from tests.small_export import (
    PRUNED,
    UNIFORM,
    make_model,
    random_tokens,
    save,
    write_held_out,
    write_unproven,
)

RECIPE = Recipe(Export=ExportSettings(prompts=6, new_tokens=12))
PROMPTS = [random_tokens(4 + 5 * n, seed=n).tolist() for n in range(6)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_held_out(tmp_path / "data")


@pytest.mark.parametrize("int8", [False, True])
def test_export(tmp_path: Path, data: Path, byte_tokenizer: Tokenizer, int8: bool) -> None:
    model = make_model(PRUNED, int8)
    folder = save(model, byte_tokenizer, tmp_path / "checkpoint")
    result = export(RECIPE, folder, data, tmp_path / "out")
    assert result.flavour == ("int8" if int8 else "fp32")
    assert result.integer_kernels == (13 if int8 else 0)
    names = {"model.onnx", "config.json", "tokenizer.json", "export.json"}
    assert {path.name for path in result.folder.iterdir()} == names
    card = json.loads((result.folder / "export.json").read_text())
    assert card["source"] == checkpoint_digest(folder)
    assert card["sha256"] == sha256(result.folder / "model.onnx")
    assert card["bytes"] == result.n_bytes == (result.folder / "model.onnx").stat().st_size
    assert card["n_head"] == [2, 1, 3] and card["eos_id"] == 256
    proof = card["proof"]
    assert (proof["prompts"], proof["new_tokens"]) == (6, 12)
    assert proof["linear_error"] <= 1 and proof["argmax_agreement"] > 0.95
    assert proof["mean_error"] < (0.01 if int8 else 2e-6) * proof["logits_std"]
    assert proof["max_error"] == result.max_error
    # Same greedy text, by the exported folder alone.
    greedy = GenerationSettings(decode_strategy="greedy_search", max_dec_len=8)
    if not result.ties:
        assert OnnxModel(result.folder).greedy(PROMPTS, 8) == generate(model, PROMPTS, greedy, 256)


def test_int8_is_a_quarter_of_float(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    config = GPTConfig(2048, 64, 128, 32, (4,) * 2, (512,) * 2)
    sizes = []
    for int8 in (False, True):
        folder = tmp_path / str(int8)
        write_unproven(make_model(config, int8), byte_tokenizer, folder)
        sizes.append((folder / "model.onnx").stat().st_size)
    assert sizes[1] < 0.3 * sizes[0]


def test_a_failed_proof_leaves_nothing(
    tmp_path: Path, data: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = save(make_model(UNIFORM), byte_tokenizer, tmp_path / "checkpoint")
    strict = Recipe(Export=ExportSettings(prompts=4, new_tokens=4, tolerance=1e-9))
    with pytest.raises(ProofError, match=r"limit 1e-09"):
        export(strict, folder, data, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "data"]


def _scale(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(graph: onnx.ModelProto) -> None:
        tensor = next(t for t in graph.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    return change


def _erf_gelu(graph: onnx.ModelProto) -> None:
    for node in graph.graph.node:
        if node.op_type == "Gelu":
            node.attribute[0].s = b"none"


DEFECTS = {
    "gelu": (False, _erf_gelu),
    "bias": (False, _scale("h.1.mlp.c_fc.bias", 1.001)),
    "position": (False, _scale("wpe.weight", 1.001)),
    "activation scale": (True, _scale("h.0.attn.c_attn.scale", 1.002)),
    "head's scale": (True, _scale("lm_head.scale", 1.002)),
    "weight scale": (True, _scale("h.1.mlp.c_fc.weight_scale", 1.0002)),
    "int8 bias": (True, _scale("h.1.mlp.c_proj.bias", 1.001)),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_changed_graph_fails_the_proof(
    tmp_path: Path, byte_tokenizer: Tokenizer, defect: str
) -> None:
    int8, change = DEFECTS[defect]
    model = make_model(UNIFORM, int8)
    write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    change(graph)
    onnx.save(graph, tmp_path / "model.onnx")
    said = "parts from torch's on the same input" if int8 else "logits differ from torch's"
    with pytest.raises(ProofError, match=said):
        prove(model, tmp_path, PROMPTS, 4, 1e-3)


def test_a_graph_off_the_integer_path_fails(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Right in its numbers, but run in float: an operator hides the quantized input."""
    model = make_model(UNIFORM, int8=True)
    write_unproven(model, byte_tokenizer, tmp_path)
    file = tmp_path / "model.onnx"
    assert count_kernels(model, file) == 9
    graph = onnx.load(file)
    product = next(n for n in graph.graph.node if n.name == "h.1.mlp.c_fc.matmul")
    hidden = onnx.helper.make_node("Abs", [product.input[1]], ["hidden"])
    graph.graph.node.insert(list(graph.graph.node).index(product), hidden)
    product.input[1] = "hidden"
    onnx.save(graph, file)
    with pytest.raises(ProofError, match="8 integer and 1 float"):
        count_kernels(model, file)


def test_an_invalid_graph_fails(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(UNIFORM)
    write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    graph.graph.node[0].input[0] = "nowhere"
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(ProofError, match="not a valid ONNX graph"):
        count_kernels(model, tmp_path / "model.onnx")


@torch.inference_mode()
def test_greedy_texts_may_part_only_within_the_error(caplog: pytest.LogCaptureFixture) -> None:
    model: GPT = make_model(UNIFORM)
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=5)
    theirs = generate(model, PROMPTS[:2], settings)
    ours = [theirs[0], [*theirs[1][:3], (theirs[1][3] + 1) % 384, 0]]
    with pytest.raises(ProofError) as caught:
        _compare_greedy(model, PROMPTS[:2], theirs, ours, max_error=1e-6)
    for part in ("prompt 1", "step 3", f"token {theirs[1][3]}", f"graph {ours[1][3]}"):
        assert part in str(caught.value)
    with caplog.at_level(logging.WARNING, "lathe"):
        (tie,) = _compare_greedy(model, PROMPTS[:2], theirs, ours, max_error=100.0)
    assert (tie.prompt, tie.step) == (1, 3) and 0 < tie.margin < 100
    assert "greedy tie, prompt 1 step 3" in caplog.text


def test_mistakes(tmp_path: Path, data: Path, byte_tokenizer: Tokenizer) -> None:
    odd = GPTConfig(384, 64, 48, 12, (4,), (96,))
    folder = save(make_model(odd), byte_tokenizer, tmp_path / "odd")
    with pytest.raises(UserError, match="head size 12 is not a multiple of 8"):
        export(RECIPE, folder, data, tmp_path / "out")
    folder = save(make_model(UNIFORM), byte_tokenizer, tmp_path / "checkpoint")
    (data / "heldout.txt").write_text("A few words.")
    with pytest.raises(UserError, match=r"heldout\.txt: 12 tokens are too few for 6 prompts"):
        export(RECIPE, folder, data, tmp_path / "out")
    (data / "heldout.txt").unlink()
    with pytest.raises(UserError, match=r"heldout\.txt: no such file"):
        export(RECIPE, folder, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
