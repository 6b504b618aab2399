"""The OpenVINO runtime, with the same ONNX file as onnxruntime."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.export.proof import QUANTIZATION_SHARE
from lathe.model.checkpoint import load_checkpoint
from lathe.release.deploy import _check_ways, deploy, find_divergence, greedy_tokens
from lathe.release.rehearsal import RehearsedAnswer
from lathe_base.config.settings import ExportSettings, GenerationSettings, Recipe, ServingSettings
from lathe_base.errors import Code, StageError
from lathe_serving.client import Client
from lathe_serving.repository import write_repository
from lathe_serving.runtime import open_model as open_model_module
from lathe_serving.runtime.open_model import mean_difference, open_model
from lathe_serving.runtime.openvino_model import OpenVINOModel
from lathe_serving.server import ANY_PORTS, start
from lathe_serving.state import LOG_FILE
from tests.support.cpu import WITHOUT_VNNI
from tests.support.errors import raises
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
from tests.support.tables import quick_only

EXACT = 1e-5  # tolerance of float32 logits
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (UNIFORM, {"int8": True}),
    "int8, pruned": (PRUNED, {"int8": True}),
    "int8, some in float": (UNIFORM, {"int8": True, "skip": LINEARS}),
    "int8 weights alone": (UNIFORM, {"int8": True, "weight_only": True}),
    "int4": (UNIFORM, {"int8": True, "group_size": 32}),
    "int4, padded, pruned": (PRUNED, {"int8": True, "group_size": 32}),
    "int4 and int8": (UNIFORM, {"int8": True, "group_size": 32, "wide": LINEARS}),
    "int4 weights alone": (UNIFORM, {"int8": True, "group_size": 32, "weight_only": True}),
    "int4, zero points": (PRUNED, {"int8": True, "group_size": 32, "zero_points": True}),
}
STATIC_INT8 = ("int8", "int8, pruned", "int8, some in float")
"""Shapes whose 8-bit products overflow in OpenVINO on CPUs without VNNI."""


@pytest.mark.parametrize("shape", [UNIFORM, PRUNED], ids=["uniform", "pruned"])
def test_float_logits_are_onnxruntimes(
    shape: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    own = write_unproven(make_model(shape), byte_tokenizer, tmp_path)
    other = OpenVINOModel(tmp_path, threads=1)
    for prompt in PROMPTS:
        tokens = np.array([prompt])
        np.testing.assert_allclose(other.logits(tokens), own.logits(tokens), atol=EXACT)
    assert other.greedy(PROMPTS, 8, False) == own.greedy(PROMPTS, 8, False)


QUICK_SHAPES = ["int8, pruned", "int4", "int8 weights alone", "int4, zero points"]


@pytest.mark.parametrize("case", quick_only(SHAPES, QUICK_SHAPES))
def test_quantized_logits_are_onnxruntimes_within_the_limit_of_a_proof(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    shape, options = SHAPES[case]
    model = make_model(shape, **options)
    own = write_unproven(model, byte_tokenizer, tmp_path / "own")
    change = quantization_change(model, own, PROMPTS, byte_tokenizer, tmp_path / "float")
    other = OpenVINOModel(tmp_path / "own", threads=1)
    is_right = mean_difference(own, other, PROMPTS) < QUANTIZATION_SHARE * change
    assert is_right != (WITHOUT_VNNI and case in STATIC_INT8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A verified INT4 export."""
    at = tmp_path_factory.mktemp("exported")
    model = make_model(UNIFORM, int8=True, group_size=32)
    source = save(model, byte_tokenizer, at / "checkpoint")
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    return export(recipe, source, write_held_out(at / "data"), at / "onnx").folder


@pytest.mark.parametrize("speedup", [0.9, 1.1])
def test_auto_takes_the_faster_runtime(
    speedup: float, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"onnxruntime": [1.0, 1.0, 1.0], "openvino": [1.0, 1.0, speedup**-3]}
    monkeypatch.setattr(open_model_module, "_seconds", lambda model, rows: times[model.runtime])
    opened = open_model(exported, threads=1, runtime="auto")
    assert opened.model.runtime == ("openvino" if speedup > 1 else "onnxruntime")
    assert f"{speedup:.2f} times as fast as onnxruntime" in opened.reason


def test_auto_measures(exported: Path) -> None:
    opened = open_model(exported, threads=1, runtime="auto", rows=2)
    assert "prompt" in opened.reason and "2 rows" in opened.reason


def test_a_runtime_that_computes_something_else_does_not_serve(
    exported: Path, tmp_path: Path
) -> None:
    strict = with_changed_metadata(
        exported, tmp_path / "strict", lambda m: m["proof"].update(mean_limit=1e-12)
    )
    with raises(Code.NOT_PROVED, "OpenVINO", "limit 1e-12"):
        open_model(strict, threads=1, runtime="openvino")
    opened = open_model(strict, threads=1, runtime="auto")
    assert opened.model.runtime == "onnxruntime" and "differ" in opened.reason


def test_an_earlier_export_is_served_by_onnxruntime(exported: Path, tmp_path: Path) -> None:
    earlier = with_changed_metadata(
        exported, tmp_path / "earlier", lambda metadata: metadata.pop("samples")
    )
    with raises(Code.INCOMPLETE, earlier, "OpenVINO"):
        open_model(earlier, threads=1, runtime="openvino")
    assert open_model(earlier, threads=1, runtime="auto").model.runtime == "onnxruntime"


def test_openvino_reports_no_import_to_its_makers(exported: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from lathe_serving.runtime.open_model import open_model\n"
        "open_model(Path(sys.argv[1]), runtime='openvino')\n"
        "from openvino.tools.ovc import telemetry\n"
        "print(type(telemetry).__module__, 'openvino_telemetry.main' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(exported)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "False"], done.stderr


def test_an_export_in_float16_is_onnxruntimes(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    write_unproven(make_model(UNIFORM), byte_tokenizer, tmp_path, dtype="float16")
    with raises(Code.UNSUPPORTED, tmp_path, "float16"):
        OpenVINOModel(tmp_path)


@pytest.mark.slow
def test_triton_serves_with_openvino(
    tmp_path: Path, triton: None, byte_tokenizer: Tokenizer
) -> None:
    source = save(make_model(UNIFORM), byte_tokenizer, tmp_path / "checkpoint")
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, source, data, tmp_path / "onnx").folder
    serving = ServingSettings(**ANY_PORTS, max_running=3, threads=1, runtime="openvino")
    repository = write_repository(folder, tmp_path / "models", serving, GenerationSettings())
    checkpoint, options = load_checkpoint(source), {"decode_strategy": "greedy_search"}
    with (
        start(repository, serving, tmp_path / "state") as server,
        Client(server.state.grpc, server.state.model_name) as client,
    ):
        log = (tmp_path / "state" / LOG_FILE).read_text()
        for _ in range(3):  # a prefix is cached on its second use
            for prompt in ("a beginning that is shared, and more", "x"):
                found = client.generate(prompt, max_tokens=12, min_tokens=0, **options).tokens
                assert found == greedy_tokens(checkpoint, prompt, 12)
    assert "runs with openvino: requested" in log


@pytest.mark.slow
def test_an_int4_model_is_deployed_with_openvino(
    triton: None, exported: Path, tmp_path: Path
) -> None:
    serving = ServingSettings(**ANY_PORTS, threads=1, runtime="openvino")
    recipe = Recipe(Serving=serving, Export=ExportSettings(new_tokens=12))
    result = deploy(recipe, exported, exported.with_name("checkpoint"), tmp_path / "deployed")
    assert result.identical + result.near_ties == result.prompts > 0


def test_answers_of_one_server_may_differ_at_ties_only(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, prompt = load_checkpoint(exported.with_name("checkpoint")), "a prompt"
    mine = greedy_tokens(checkpoint, prompt, 4)
    other = [*mine[:2], (mine[2] + 1) % UNIFORM.vocab_size, *mine[3:]]
    divergence = find_divergence(checkpoint, prompt, mine, other)
    assert divergence is not None
    answers, ways = [RehearsedAnswer("", mine, 0.0, 0.0)], {"another way": [other]}
    _check_ways(checkpoint, [prompt], answers, ways, divergence.gap)
    for most in (divergence.gap * 0.99, -math.inf):
        with raises(Code.NOT_PROVED, "another way: 'a prompt'", kind=StageError):
            _check_ways(checkpoint, [prompt], answers, ways, most)
