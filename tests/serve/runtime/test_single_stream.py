"""The runtime with a second copy of INT8 weights for single-token steps."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.export.proof import QUANTIZATION_SHARE
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.release.deploy import deploy
from lathe_base.config.settings import ExportSettings, Recipe, ServingSettings
from lathe_base.errors import Code
from lathe_serving.runtime import open_model as open_model_module
from lathe_serving.runtime.exported_model import MODEL
from lathe_serving.runtime.open_model import mean_difference, open_model
from lathe_serving.runtime.single_stream import SingleStreamModel, write_single_stream_graph
from lathe_serving.server import ANY_PORTS
from tests.support import families
from tests.support.cpu import WITHOUT_VNNI
from tests.support.errors import raises
from tests.support.families import CASES, quantized
from tests.support.small_export import (
    LINEARS,
    PROMPTS,
    PRUNED,
    UNIFORM,
    make_model,
    quantization_change,
    save,
    with_changed_metadata,
    write_held_out,
    write_unproven,
)

RUNTIME = "onnxruntime_single_stream"
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (UNIFORM, {}),
    "pruned": (PRUNED, {}),
    "some in float": (UNIFORM, {"skip": LINEARS}),
    "int4 and int8": (UNIFORM, {"group_size": 32, "wide": LINEARS}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_logits_are_onnxruntimes_within_the_limit_of_a_proof(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    shape, options = SHAPES[case]
    model = make_model(shape, int8=True, **options)
    own = write_unproven(model, byte_tokenizer, tmp_path / "own")
    change = quantization_change(model, own, PROMPTS, byte_tokenizer, tmp_path / "float")
    other = SingleStreamModel(tmp_path / "own", threads=1)
    assert mean_difference(own, other.single_stream, PROMPTS) < QUANTIZATION_SHARE * change


def test_inputs_are_rounded_more_finely_than_by_calibration(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """Dynamic quantization is closer than static to torch's logits with float inputs."""
    own = write_unproven(make_model(UNIFORM, int8=True), byte_tokenizer, tmp_path)
    other = SingleStreamModel(tmp_path, threads=1).single_stream
    weights_alone = make_model(UNIFORM, int8=True, weight_only=True)
    tokens = np.array([PROMPTS[0]])
    with torch.no_grad():
        expected = weights_alone(torch.from_numpy(tokens)).numpy()
    static, dynamic = (np.abs(m.logits(tokens) - expected).mean() for m in (own, other))
    assert dynamic < 0.7 * static


def test_steps_of_one_token_take_the_second_copy_and_others_the_first(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    own = write_unproven(make_model(UNIFORM, int8=True), byte_tokenizer, tmp_path)
    model = SingleStreamModel(tmp_path, threads=1)
    caches = [m.start(2, 48) for m in (own, model, model.single_stream)]
    models = own, model, model.single_stream
    prompt, token = np.array([PROMPTS[1]]), np.array([[5]])
    rows = [m.rows(cache, 0, 1) for m, cache in zip(models, caches, strict=True)]
    plain, read, single = (m.step(row, prompt) for m, row in zip(models, rows, strict=True))
    np.testing.assert_array_equal(read, plain)
    # With the same cache, steps of one row run the second graph, and steps of two rows the first.
    for target in caches[1:]:
        for buffer, source in zip(target.buffers, caches[0].buffers, strict=True):
            buffer[:] = source
    plain, read, single = (m.step(row, token) for m, row in zip(models, rows, strict=True))
    np.testing.assert_array_equal(read, single)
    assert np.abs(read - plain).max() > 0
    for cache in caches:
        cache.permute([1], [0])
    for target, source in zip(caches[1].buffers, caches[0].buffers, strict=True):
        target[:] = source
    both = np.array([[5], [5]])
    np.testing.assert_array_equal(model.step(caches[1], both), own.step(caches[0], both))


def test_weights_and_scales_are_the_exports(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    write_unproven(make_model(PRUNED, int8=True), byte_tokenizer, tmp_path)
    assert write_single_stream_graph(tmp_path / MODEL, tmp_path / "single.onnx")
    first, second = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for path in (tmp_path / MODEL, tmp_path / "single.onnx")
    )
    linear, head = "h.0.attn.c_attn", "logits"
    for rows, name in (
        (first[f"{linear}.weight"].T, f"{linear}.matmul"),
        (first["wte.weight"], head),
    ):
        packed = second[f"{name}.rows"].reshape(len(rows), -1).astype(int) - 128
        np.testing.assert_array_equal(packed[:, : rows.shape[1]], rows)
        assert not packed[:, rows.shape[1] :].any()
    np.testing.assert_array_equal(second[f"{head}.scales"], first["wte.weight_scale"])
    assert f"{linear}.weight" not in second


# All of these families are also verified in INT8 with the usual graph.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if i % 8 else ()) for i, case in enumerate(CASES)],
)
def test_other_families(case: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    name, changes = CASES[case]
    source = families.save(families.make(name, **changes), tmp_path / "hf", byte_tokenizer)
    model = quantized(load_checkpoint(source).model)
    save_checkpoint(tmp_path / "q", model, byte_tokenizer, "quantize", Recipe())
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=12))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, tmp_path / "q", data, tmp_path / "onnx").folder
    opened = open_model(folder, threads=1, runtime=RUNTIME)  # checks the error limit
    assert opened.model.runtime == RUNTIME


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A verified INT8 export."""
    at = tmp_path_factory.mktemp("exported")
    source = save(make_model(UNIFORM, int8=True), byte_tokenizer, at / "checkpoint")
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    return export(recipe, source, write_held_out(at / "data"), at / "onnx").folder


def test_auto_takes_it_where_it_is_the_fastest(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"onnxruntime": 1.0, RUNTIME: 0.7, "openvino": 0.8}
    times = {name: [1.0, one_row, 1.0] for name, one_row in seconds.items()}
    monkeypatch.setattr(open_model_module, "_seconds", lambda model, rows: times[model.runtime])
    opened = open_model(exported, threads=1, runtime="auto")
    assert opened.model.runtime == RUNTIME
    assert "one row 1.43" in opened.reason
    assert ("logits of OpenVINO differ" if WITHOUT_VNNI else "one row 1.25") in opened.reason


def test_a_graph_that_computes_something_else_does_not_serve(
    exported: Path, tmp_path: Path
) -> None:
    strict = with_changed_metadata(
        exported, tmp_path / "strict", lambda m: m["proof"].update(mean_limit=1e-12)
    )
    with raises(Code.NOT_PROVED, "single-stream", "limit 1e-12"):
        open_model(strict, threads=1, runtime=RUNTIME)


def test_a_model_without_int8_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    write_unproven(make_model(UNIFORM), byte_tokenizer, tmp_path)
    with raises(Code.UNSUPPORTED, tmp_path, "INT8"):
        SingleStreamModel(tmp_path)


@pytest.mark.slow
def test_it_is_deployed_on_triton(triton: None, exported: Path, tmp_path: Path) -> None:
    serving = ServingSettings(**ANY_PORTS, threads=1, runtime=RUNTIME)
    recipe = Recipe(Serving=serving, Export=ExportSettings(new_tokens=12))
    result = deploy(recipe, exported, exported.with_name("checkpoint"), tmp_path / "deployed")
    assert result.identical + result.near_ties == result.prompts > 0
