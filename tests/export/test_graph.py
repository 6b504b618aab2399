from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from lathe.export.model_graph import build
from lathe.model.checkpoint import HFTensors
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight, integer_weight
from lathe.model.quantization import LinearFormat, WeightFormat
from lathe_serving.runtime.session import open_session
from tests.support.small_export import (
    PRUNED,
    UNIFORM,
    make_model,
    random_tokens,
    save,
    write_unproven,
)


def weights(model: GPT) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in HFTensors(model).items()}


def test_float_logits_are_those_of_transformers(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(UNIFORM)
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint").eval()
    tokens = random_tokens(3, 40)
    with torch.no_grad():
        expected = reference(tokens).logits.numpy()
    logits = exported.logits(tokens.numpy())
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_pruned_widths(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(PRUNED)
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        expected = model(tokens).numpy()
    np.testing.assert_allclose(exported.logits(tokens.numpy()), expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, 33])
def test_every_integer_linear_is_exact_integer_arithmetic(
    tmp_path: Path, byte_tokenizer: Tokenizer, length: int
) -> None:
    """Each linear, with its actual inputs in the model, against integer arithmetic in numpy."""
    model = make_model(PRUNED, int8=True)
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    linears = _integer_linears(graph)
    assert len(linears) == 4 * PRUNED.n_layer + 1
    watched = {name for linear in linears.values() for name in linear} - {"logits"}
    graph.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(watched)
    )
    session = open_session(graph.SerializeToString())
    feeds = _prompt(random_tokens(2, length).numpy())
    for i, n_head in enumerate(PRUNED.n_head):
        empty = np.zeros((2, n_head, 0, exported.head_dim), np.float32)
        for part in ("key", "value"):
            feeds[f"past_{part}_{i}"], feeds[f"chunk_past_{part}_{i}"] = empty, empty[:1]
    names = [*sorted(watched), "logits"]
    seen = dict(zip(names, session.run(names, feeds), strict=True))
    plan, float_weights = model.config.quantization, weights(model)
    assert plan is not None
    for name, (source, result) in linears.items():
        input_scale = np.float32(plan.activation_scales[name])
        x = np.clip(np.rint(seen[source] / input_scale) + 128, 0, 255).astype(np.int64) - 128
        weight = float_weights["wte.weight"].T if name == "lm_head" else None
        weight = float_weights[f"{name}.weight"] if weight is None else weight
        scale = np.abs(weight).max(axis=0) / np.float32(127)
        q = np.rint(weight / scale).astype(np.int64)
        bias = 0.0 if name == "lm_head" else float_weights[f"{name}.bias"]
        expected = (x @ q) * (np.float64(input_scale) * scale) + bias
        assert len(np.unique(x)) > 20, name
        # Only the final rounding to float32: an input off by one step would differ by 1e-3 or more.
        np.testing.assert_allclose(seen[result], expected, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("length", [1, 33])
def test_every_int4_linear_multiplies_the_integers_of_its_groups(
    tmp_path: Path, byte_tokenizer: Tokenizer, length: int, zero_points: bool
) -> None:
    """Each linear, with its actual inputs in the model, against the file's integers in numpy."""
    model = make_model(PRUNED, int8=True, group_size=32, zero_points=zero_points)
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    stored = _initializers(graph)
    linears = [node for node in graph.graph.node if node.op_type == "MatMulNBits"]
    assert len(linears) == 4 * PRUNED.n_layer + 1
    watched = {name for node in linears for name in (node.input[0], node.output[0])} - {"logits"}
    graph.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(watched)
    )
    session = open_session(graph.SerializeToString())
    tokens = random_tokens(2, length).numpy()
    feeds = exported.feeds(tokens, np.full(2, length), np.tile(np.arange(length), (2, 1)))
    names = [*sorted(watched), "logits"]
    seen = dict(zip(names, session.run(names, feeds), strict=True))
    for node in linears:
        packed, scale = (stored[name] for name in node.input[1:3])  # (N, groups, 16), (N, groups)
        bytes_ = packed.astype(np.int64)
        weight = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(*scale.shape, 32)
        zeros = np.full_like(scale, 8, np.int64)
        if zero_points:
            both = stored[node.input[3]].astype(np.int64)
            zeros = np.stack([both & 15, both >> 4], -1).reshape(len(scale), -1)
            zeros = zeros[:, : scale.shape[1]]
            assert len(np.unique(zeros)) > 3
        weight = weight - zeros[..., None]
        x = seen[node.input[0]]
        x = np.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % 32)]).reshape(2, length, -1, 32)
        x_scale = np.abs(x).max(-1, keepdims=True) / np.float64(127)
        rounded = np.rint(x / x_scale).astype(np.int64)
        sums = np.einsum("btgi,ngi->btng", rounded, weight)
        expected = (sums * scale * x_scale[..., 0][:, :, None]).sum(-1)
        expected += stored[node.input[5]] if len(node.input) > 5 else 0.0
        found = seen[node.output[0]]
        step = (
            np.abs(scale).max() * np.abs(weight).max() * x_scale.max()
        )  # effect of an input halfway between two integers
        close = np.isclose(found, expected, rtol=2e-6, atol=1e-5)
        assert close.mean() > 0.95 and np.abs(found - expected).max() < 2 * step, node.name


def test_mixed_plan_leaves_skipped_linears_float(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(UNIFORM, int8=True, skip=("h.1.mlp.c_proj", "lm_head"))
    write_unproven(model, byte_tokenizer, tmp_path)
    stored = _initializers(onnx.load(tmp_path / "model.onnx"))
    assert stored["h.1.mlp.c_proj.weight"].dtype == np.float32
    assert stored["h.1.mlp.c_fc.weight"].dtype == np.int8
    assert stored["wte.weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, np.float32),
        ({"int8": True}, np.int8),
        ({"int8": True, "group_size": 32}, np.uint8),
        ({"int8": True, "group_size": 32, "zero_points": True}, np.uint8),
    ],
)
def test_the_embedding_is_stored_once(
    tmp_path: Path, byte_tokenizer: Tokenizer, options: dict[str, Any], dtype: type[Any]
) -> None:
    model = make_model(UNIFORM, **options)
    write_unproven(model, byte_tokenizer, tmp_path)
    stored = _initializers(onnx.load(tmp_path / "model.onnx"))
    tables = [
        n for n, v in stored.items() if v.shape[:1] == (UNIFORM.vocab_size,) and v.dtype == dtype
    ]
    assert tables == ["wte.weight"] + ["wte.weight_zero"] * ("zero_points" in options)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["abs_max", "channel_wise_abs_max"])
def test_weights_are_quantized_as_in_training(kind: str, bits: int) -> None:
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0  # a dead output channel
    form = WeightFormat(kind, bits)  # type: ignore[arg-type]
    stored = integer_weight(weight, LinearFormat(form))
    assert stored.values.dtype == torch.int8
    torch.testing.assert_close(stored.floats, fake_quantize_weight(weight, form), rtol=0, atol=0)


def test_int8_weights_with_float_activations(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = make_model(PRUNED, int8=True, weight_only=True)
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx")
    assert "QuantizeLinear" not in {node.op_type for node in graph.graph.node}
    stored = _initializers(graph)
    for name in (f"{linear}.weight" for linear in PRUNED.linear_names()):
        weight = torch.from_numpy(weights(model)[name])  # (in, out)
        scale = weight.abs().amax(0) / 127
        zero = torch.zeros(len(scale), dtype=torch.int32)
        theirs = torch.fake_quantize_per_channel_affine(weight, scale, zero, 1, -128, 127)
        assert stored[name].dtype == np.int8
        ours = stored[name] * stored[f"{name}_scale"]
        # torch multiplies by 1 / s, ONNX divides by s: a few values round differently
        assert (np.abs(ours - theirs.numpy()) > 1e-6).mean() < 1e-3, name
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        expected = model(tokens).numpy()
        in_float = make_model(PRUNED)(tokens).numpy()
    logits = exported.logits(tokens.numpy())
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert np.abs(logits - in_float).max() > 1e-2


@pytest.mark.parametrize("opset", [20, 22])
def test_opset(opset: int, tmp_path: Path) -> None:
    build(UNIFORM, weights(make_model(UNIFORM)), None, opset).save(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert next(o.version for o in model.opset_import if o.domain == "") == opset
    onnx.checker.check_model(model, full_check=True)


def test_weights_are_views_of_the_model(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = make_model(UNIFORM, int8=True)
    saved = load_file(save(model, byte_tokenizer, tmp_path) / "model.safetensors")
    found = weights(model)
    assert {f"transformer.{name}" for name in found} == set(saved)
    for name, value in found.items():
        assert value.base is not None
        np.testing.assert_array_equal(value, saved[f"transformer.{name}"])


def _integer_linears(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    """Names of the float input, before quantization, and of the output by module path."""
    producer = {node.output[0]: node for node in model.graph.node}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and producer[node.input[0]].op_type == "DequantizeLinear":
            quantize = producer[producer[node.input[0]].input[0]]
            name = quantize.input[1].removesuffix(".scale")
            found[name] = (quantize.input[0], "logits" if name == "lm_head" else name)
    return found


def _initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def _prompt(tokens: np.ndarray) -> dict[str, np.ndarray]:
    batch, length = tokens.shape
    positions = np.tile(np.arange(length), (batch, 1))
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "seqlens_k": np.full(batch, length - 1, np.int32),
        "total_sequence_length": np.array(length, np.int32),
        "logits_index": positions,
        "chunk_length": np.array(0),
        "chunk_total": np.array(0, np.int32),
    }
