import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from lathe.export import proof
from lathe.export.export import export
from lathe.export.prompts import held_out_prompts
from lathe.export.proof import ProofError, _compare_greedy, count_kernels, prove
from lathe.model.config import GPTConfig
from lathe.model.folder import checkpoint_digest
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe_base.artifacts.kinds import open_export
from lathe_base.config.settings import (
    ExportSettings,
    GenerationSettings,
    Recipe,
    ServingSettings,
)
from lathe_base.errors import Code
from lathe_base.storage import sha256
from lathe_base.storage.ownership import ATTESTATIONS
from lathe_serving.repository import write_repository
from lathe_serving.runtime.open_model import OPENERS, open_model
from lathe_serving.runtime.openvino_model import OpenVINOModel
from lathe_serving.runtime.session import OnnxModel
from tests.support.errors import raises
from tests.support.small_export import (
    PRUNED,
    UNIFORM,
    make_model,
    random_tokens,
    save,
    write_held_out,
    write_unproven,
)
from tests.support.tables import quick_only
from tests.support.tokenizers import metaspace_tokenizer

RECIPE = Recipe(Export=ExportSettings(prompts=6, new_tokens=12))
PROMPTS = [random_tokens(4 + 5 * n, seed=n).tolist() for n in range(6)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_held_out(tmp_path / "data")


def test_prompts_begin_as_texts_do(data: Path) -> None:
    plain, begun = (
        held_out_prompts(metaspace_tokenizer(puts_bos), data, 5, 16) for puts_bos in (False, True)
    )
    assert [len(prompt) for prompt in begun] == [len(prompt) for prompt in plain]
    assert begun == [[1, *prompt[:-1]] for prompt in plain]


# Relative to the standard deviation of the logits.
MEAN_ERROR = {
    "fp32": 2e-6,
    "fp16": 2e-3,
    "int8": 1e-2,
    "int8 weights": 2e-6,
    "int4": 1e-2,
    "int4 weights": 2e-6,
    "int4 among int8": 1e-2,
    "int4 beside an int8 head": 1e-2,
}
BLOCK = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
WIDE = {
    "int4 among int8": ("h.0.attn.c_attn", *(f"h.1.{name}" for name in BLOCK)),
    "int4 beside an int8 head": ("lm_head", "h.2.mlp.c_proj"),
}


def _quantized(config: GPTConfig, flavour: str) -> GPT:
    size = 32 if "int4" in flavour else 0
    weight_only, wide = "weights" in flavour, WIDE.get(flavour, ())
    return make_model(config, "int" in flavour, (), weight_only, size, wide)


@pytest.mark.parametrize(
    "flavour", quick_only(MEAN_ERROR, ["fp32", "int8", "int4 beside an int8 head"])
)
def test_export(tmp_path: Path, data: Path, byte_tokenizer: Tokenizer, flavour: str) -> None:
    model = _quantized(PRUNED, flavour)
    folder = save(model, byte_tokenizer, tmp_path / "checkpoint")
    dtype = "float16" if flavour == "fp16" else "float32"
    settings = RECIPE.Export.model_copy(update={"dtype": dtype})
    result = export(Recipe(Export=settings), folder, data, tmp_path / "out")
    assert result.flavour == flavour.split()[0]
    assert result.integer_kernels == (13 if flavour in ("int8", "int4", *WIDE) else 0)
    names = {"model.onnx", "config.json", "tokenizer.json", "export.json", ATTESTATIONS}
    assert {path.name for path in result.folder.iterdir()} == names
    metadata = json.loads((result.folder / "export.json").read_text())
    assert metadata["source"] == checkpoint_digest(folder)
    assert metadata["sha256"] == sha256(result.folder / "model.onnx")
    assert metadata["bytes"] == result.n_bytes == (result.folder / "model.onnx").stat().st_size
    assert metadata["n_head"] == [2, 1, 3] and metadata["eos_id"] == 256
    proof = metadata["proof"]
    assert (proof["prompts"], proof["new_tokens"]) == (6, 12)
    assert proof["linear_error"] <= 1 and proof["argmax_agreement"] > 0.95
    assert proof["mean_error"] < MEAN_ERROR[flavour] * proof["logits_std"]
    assert proof["max_error"] == result.max_error
    # Same greedy text, using only the exported folder.
    greedy = GenerationSettings(decode_strategy="greedy_search", max_dec_len=8)
    expected = generate(model, PROMPTS, greedy, 256)
    found = OnnxModel(result.folder).greedy(PROMPTS, 8)
    if flavour in WIDE:
        with torch.inference_mode():
            _compare_greedy(model, PROMPTS, expected, found, max_gap=proof["mean_limit"])
    elif not result.ties:
        assert found == expected


@pytest.mark.parametrize("flavour", quick_only(["fp32", "int8", "int4"], ["int4"]))
def test_weights_of_a_large_graph_are_in_a_file_beside_it(
    tmp_path: Path,
    data: Path,
    byte_tokenizer: Tokenizer,
    flavour: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = save(_quantized(PRUNED, flavour), byte_tokenizer, tmp_path / "checkpoint")
    one = export(RECIPE, checkpoint, data, tmp_path / "one")
    monkeypatch.setattr("lathe.export.graph.PROTOBUF_LIMIT", 2**14)
    found = export(RECIPE, checkpoint, data, tmp_path / "out")
    graph, weights = found.folder / "model.onnx", found.folder / "model.onnx.data"
    assert graph.stat().st_size < weights.stat().st_size
    assert found.n_bytes == graph.stat().st_size + weights.stat().st_size
    # The graph's digest is that of the weights, too.
    (digest,) = (x.value for x in onnx.load(graph, load_external_data=False).metadata_props)
    assert digest == sha256(weights)
    # The same logits in every runtime, also from a copy for the server.
    serving = ServingSettings()
    repository = write_repository(found.folder, tmp_path / "r", serving, GenerationSettings())
    tokens = np.array([PROMPTS[0]])
    for runtime in ("onnxruntime", *OPENERS):
        if (flavour, runtime) == ("fp32", "onnxruntime_single_stream"):
            continue
        expected, logits = (
            open_model(folder, 1, runtime).model.logits(tokens)
            for folder in (one.folder, repository / "gpt" / "1")
        )
        np.testing.assert_array_equal(logits, expected)
    weights.write_bytes(weights.read_bytes()[:-1])
    with raises(Code.CORRUPT, weights):
        open_export(found.folder)


def test_int4_is_a_seventh_of_float_int8_a_quarter_and_float16_half(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    config = GPTConfig(2048, 64, 128, 32, (4,) * 2, (512,) * 2)
    kinds: dict[str, tuple[bool, int, Any]] = {
        "whole": (False, 0, "float32"),
        "half": (False, 0, "float16"),
        "quarter": (True, 0, "float32"),
        "seventh": (True, 64, "float32"),
    }
    for name, (int8, group_size, dtype) in kinds.items():
        model = make_model(config, int8, group_size=group_size)
        write_unproven(model, byte_tokenizer, tmp_path / name, dtype)
    whole, half, quarter, seventh = ((tmp_path / k / "model.onnx").stat().st_size for k in kinds)
    assert half < 0.55 * whole
    assert quarter < 0.3 * whole
    assert seventh < 0.18 * whole


def test_a_failed_proof_leaves_nothing(
    tmp_path: Path, data: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(proof.NOISE_FACTOR, np.float32, 1e-9)
    folder = save(make_model(UNIFORM), byte_tokenizer, tmp_path / "checkpoint")
    strict = Recipe(Export=ExportSettings(prompts=4, new_tokens=4, tolerance=1e-9))
    with raises(Code.NOT_PROVED, "limit there 1e-09", kind=ProofError):
        export(strict, folder, data, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "data"]


@pytest.mark.parametrize(("position", "is_proven"), [(1, True), (2, False)])
def test_where_noise_moves_the_logits_more_the_graph_may_too(
    position: int,
    is_proven: bool,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits after the second token change by 0.001 where an input's last bit does, and the
    graph's differ by 0.005 at one position."""
    model = make_model(UNIFORM)
    write_unproven(model, byte_tokenizer, tmp_path)
    of_graph = OnnxModel.logits

    @contextmanager
    def unstable(model: GPT, *_: object, **__: object) -> Iterator[None]:
        def move(_: torch.nn.Module, __: object, logits: torch.Tensor) -> torch.Tensor:
            return logits + 1e-3 * torch.eye(logits.shape[1])[1][:, None]

        handle = model.register_forward_hook(move)
        yield
        handle.remove()

    def moved(engine: OnnxModel, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = of_graph(engine, tokens)
        logits[:, position] += 0.005
        return logits

    monkeypatch.setattr(proof, "_rounded_otherwise", unstable)
    monkeypatch.setattr(OnnxModel, "logits", moved)
    if is_proven:
        prove(model, tmp_path, PROMPTS, 4, 1e-3)
    else:
        with raises(Code.NOT_PROVED, "0.005 at the worst position", kind=ProofError):
            prove(model, tmp_path, PROMPTS, 4, 1e-3)


def _scale(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(graph: onnx.ModelProto) -> None:
        tensor = next(t for t in graph.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor)
        value = value * value.dtype.type(factor)
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    return change


def _erf_gelu(graph: onnx.ModelProto) -> None:
    for node in graph.graph.node:
        if node.op_type == "Gelu":
            node.attribute[0].s = b"none"


def _swapped_parts(graph: onnx.ModelProto) -> None:
    attention = next(node for node in graph.graph.node if node.name == "h.1.attn")
    branch = next(a.g for a in attention.attribute if a.name == "then_branch")
    joined = next(node for node in branch.node if node.op_type == "Concat")
    joined.input.append(joined.input.pop(0))


DEFECTS = {
    "mixed step": ("float32", _swapped_parts),
    "mixed step in int8": ("int8", _swapped_parts),
    "mixed step in int4": ("int4", _swapped_parts),
    "gelu": ("float32", _erf_gelu),
    "bias": ("float32", _scale("h.1.mlp.c_fc.bias", 1.001)),
    "position": ("float32", _scale("wpe.weight", 1.001)),
    "position in float16": ("float16", _scale("wpe.weight", 1.01)),
    "activation scale": ("int8", _scale("h.0.attn.c_attn.scale", 1.002)),
    "head's scale": ("int8", _scale("lm_head.scale", 1.002)),
    "weight scale": ("int8", _scale("h.1.mlp.c_fc.weight_scale", 1.0002)),
    "int8 bias": ("int8", _scale("h.1.mlp.c_proj.bias", 1.001)),
    "weight scale alone": ("int8 weights", _scale("h.1.mlp.c_fc.weight_scale", 1.0002)),
    "int8 position": ("int8", _scale("wpe.weight_scale", 1.001)),
    "int4 scale": ("int4", _scale("h.1.mlp.c_fc.weight_scale", 1.0002)),
    "int4 bias": ("int4", _scale("h.1.mlp.c_proj.bias", 1.001)),
    "int4 embedding": ("int4", _scale("wte.weight_scale", 1.0002)),
}


QUICK = ("mixed step in int8", "bias", "position", "activation scale", "weight scale", "int4 scale")
"""A part of the graph of each kind."""


@pytest.mark.parametrize("defect", quick_only(DEFECTS, QUICK))
def test_a_changed_graph_fails_the_proof(
    tmp_path: Path, byte_tokenizer: Tokenizer, defect: str
) -> None:
    flavour, change = DEFECTS[defect]
    quantized = "int" in flavour
    model = _quantized(UNIFORM, flavour)
    dtype: Any = "float32" if quantized else flavour
    write_unproven(model, byte_tokenizer, tmp_path, dtype)
    graph = onnx.load(tmp_path / "model.onnx")
    change(graph)
    onnx.save(graph, tmp_path / "model.onnx")
    said = "on the same input" if quantized else "logits differ"
    said = "in a mixed step" if "mixed step" in defect else said
    with raises(Code.NOT_PROVED, said, kind=ProofError):
        prove(model, tmp_path, PROMPTS, 4, 1e-3)


def test_a_graph_off_the_integer_path_fails(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Correct results, but computed in float: an extra operator hides the quantized input."""
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
    with raises(Code.NOT_PROVED, file, "8 integer and 1 float", kind=ProofError):
        count_kernels(model, file)


def test_an_invalid_graph_fails(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(UNIFORM)
    write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    graph.graph.node[-1].input[0] = "nowhere"
    onnx.save(graph, tmp_path / "model.onnx")
    with raises(Code.NOT_PROVED, tmp_path / "model.onnx", kind=ProofError):
        count_kernels(model, tmp_path / "model.onnx")


@torch.inference_mode()
def test_greedy_texts_may_part_only_within_the_error(caplog: pytest.LogCaptureFixture) -> None:
    model: GPT = make_model(UNIFORM)
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=5)
    theirs = generate(model, PROMPTS[:2], settings)
    ours = [theirs[0], [*theirs[1][:3], (theirs[1][3] + 1) % 384, 0]]
    with raises(
        Code.NOT_PROVED,
        "prompt 1",
        "step 3",
        f"token {theirs[1][3]}",
        f"graph {ours[1][3]}",
        kind=ProofError,
    ):
        _compare_greedy(model, PROMPTS[:2], theirs, ours, max_gap=1e-6)
    with caplog.at_level(logging.INFO, "lathe"):
        (tie,) = _compare_greedy(model, PROMPTS[:2], theirs, ours, max_gap=100.0)
    assert (tie.prompt, tie.step) == (1, 3) and 0 < tie.margin < 100
    assert "prompt 1, step 3: torch chooses token" in caplog.text


FLAVOURS, SIZES = ("fp32", "fp16", "int8", "int4", "prefix"), ((12, 16), (20, 24), (100, 104))


@pytest.mark.parametrize(
    ("flavour", "head_dim", "size"),
    quick_only(
        [(flavour, *size) for flavour in FLAVOURS for size in SIZES],
        [
            ("fp32", 12, 16),
            ("int8", 20, 24),
            ("int4", 100, 104),
        ],
    ),
)
def test_heads_of_any_size_are_exported(
    head_dim: int, size: int, flavour: str, tmp_path: Path, data: Path, byte_tokenizer: Tokenizer
) -> None:
    """onnxruntime's attention requires multiples of 8: other sizes are padded with zeros."""
    model = _quantized(GPTConfig(384, 64, 2 * head_dim, head_dim, (2, 1), (96, 80)), flavour)
    if flavour == "prefix":
        model.set_prefix((5, 300))
    folder = save(model, byte_tokenizer, tmp_path / "checkpoint")
    dtype = "float16" if flavour == "fp16" else "float32"
    settings = RECIPE.Export.model_copy(update={"dtype": dtype})
    export(Recipe(Export=settings), folder, data, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["head_dim"] == size
    if flavour in ("fp32", "prefix"):
        tokens = np.array([PROMPTS[0]])
        with torch.inference_mode():
            expected = model(torch.from_numpy(tokens)).numpy()
        found = OnnxModel(tmp_path / "out", threads=1).logits(tokens)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_allclose(
            OpenVINOModel(tmp_path / "out", 1).logits(tokens), found, atol=1e-4
        )


def test_mistakes(tmp_path: Path, data: Path, byte_tokenizer: Tokenizer) -> None:
    folder = save(make_model(UNIFORM, int8=True), byte_tokenizer, tmp_path / "int8")
    half = Recipe(Export=ExportSettings(dtype="float16"))
    with raises(Code.UNSUPPORTED, folder, "Export.dtype is float16"):
        export(half, folder, data, tmp_path / "out")
    folder = save(make_model(UNIFORM), byte_tokenizer, tmp_path / "checkpoint")
    (data / "heldout.txt").write_text("A few words.")
    with raises(Code.TOO_LITTLE_DATA, data / "heldout.txt", "12 tokens", "6 prompts"):
        export(RECIPE, folder, data, tmp_path / "out")
    (data / "heldout.txt").unlink()
    with raises(Code.NOT_FOUND, data / "heldout.txt"):
        export(RECIPE, folder, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_path_that_onnx_cannot_open_is_refused_before_the_work(tmp_path: Path) -> None:
    output = tmp_path / "caf\udce9"
    with raises(Code.BAD_PATH, "caf\\udce9"):
        export(Recipe(), tmp_path / "model", tmp_path / "data", output)
    assert not output.exists()
