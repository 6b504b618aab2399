"""Quantized Llamas in vLLM's build for CPUs: those that it has kernels for, and those that are
refused by name."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lathe.export.export import write
from lathe.export.fidelity import spread
from lathe.export.formats import compressed_tensors, write_formats
from lathe.export.prove import TIE, prove_files
from lathe.model import fake_quant
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_base.config.settings import ExportSettings, Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.vllm_engine import cpu_settings
from tests.serve.runtime.test_vllm import answer
from tests.support import environments
from tests.support.cpu import WITHOUT_AVX512
from tests.support.errors import raises
from tests.support.families import make, save
from tests.support.vllm_process import VLLMProcess

FORMS = {
    "float": None,
    "static INT8": LinearFormat(),
    "static INT8, a scale a tensor": LinearFormat(WeightFormat("abs_max")),
    "INT8, a scale a token": LinearFormat(activation="dynamic_int8"),
    "dynamic INT8": LinearFormat(WeightFormat.grouped(32, 8), "dynamic_int8"),
    "INT8 weights": LinearFormat(activation=None),
    "INT4": LinearFormat(WeightFormat.grouped(32, 4), "dynamic_int8"),
}
INT4 = pytest.param("INT4", marks=pytest.mark.skipif(WITHOUT_AVX512, reason="needs AVX-512"))
SERVED = ["static INT8", "static INT8, a scale a tensor", "INT8, a scale a token", INT4]
TOKENS = torch.randint(33, 250, (4, 40), generator=torch.Generator().manual_seed(3))
GREEDY = Params(decode_strategy="greedy_search", max_tokens=20, ignore_eos=True)


@dataclass
class Quantized:
    """A checkpoint, and its export with compressed-tensors."""

    checkpoint: Checkpoint
    folder: Path


@pytest.fixture
def quantized(
    request: pytest.FixtureRequest, byte_tokenizer: Tokenizer, tmp_path: Path
) -> Quantized:
    """A small Llama whose linears are in the format that is the parameter."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 192}
    model = load_checkpoint(save(make("llama", **sizes), tmp_path / "hf", byte_tokenizer)).model
    if form := FORMS[request.param]:
        plan = QuantizationPlan(dict.fromkeys(model.config.linear_names(), form))
        fake_quant.insert(model, plan)
        scales = fake_quant.calibrate(model, [TOKENS])
        model.config = model.config.with_quantization(plan.with_scales(scales))
    save_checkpoint(tmp_path / "q", model.eval(), byte_tokenizer, "quantize", Recipe())
    checkpoint, folder = load_checkpoint(tmp_path / "q"), tmp_path / "export"
    folder.mkdir()
    settings = ExportSettings(formats=[compressed_tensors.FOLDER])
    write(checkpoint, folder, settings)
    write_formats(checkpoint, folder, settings)
    return Quantized(checkpoint, folder)


@pytest.mark.parametrize("quantized", FORMS, indirect=True)
def test_a_format_without_kernels_is_refused_by_name(
    quantized: Quantized, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx avx2 avx512f avx512bw\n")
    form = request.node.callspec.params["quantized"]
    folder = quantized.folder / compressed_tensors.FOLDER
    if form in ("dynamic INT8", "INT8 weights"):
        with pytest.raises(UserError, match=r"computes INT8 weights .* on GPUs only"):
            cpu_settings(folder, cpuinfo)
    else:
        dtype = "float32" if form == "float" else "bfloat16"
        assert cpu_settings(folder, cpuinfo)["dtype"] == dtype


@pytest.mark.parametrize("quantized", ["INT4"], indirect=True)
def test_int4_is_refused_on_an_x86_without_avx_512(quantized: Quantized, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu sse4_2 avx avx2 f16c\n")
    with raises(Code.UNSUPPORTED, "INT4", "AVX-512"):
        cpu_settings(quantized.folder / compressed_tensors.FOLDER, cpuinfo)


@pytest.fixture
def _vllm() -> None:
    environments.require("vllm")


@pytest.mark.slow
@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("quantized", SERVED, indirect=True)
def test_the_proof_holds_in_vllm(quantized: Quantized) -> None:
    proof = prove_files(quantized.checkpoint, quantized.folder, "vllm", TOKENS.tolist(), 8)
    assert proof.engine.startswith("vllm 0.")
    assert 0 < proof.fidelity.kl <= proof.fidelity.kl_limit
    assert proof.fidelity.torch_agreement > 0.8  # on random weights many tokens are near ties


@pytest.mark.slow
@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("quantized", ["dynamic INT8"], indirect=True)
def test_the_proof_of_a_refused_format_says_why(
    quantized: Quantized, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageError, match="the log above says why"):
        prove_files(quantized.checkpoint, quantized.folder, "vllm", TOKENS.tolist(), 8)
    assert "on GPUs only" in capfd.readouterr().err
    with pytest.raises(UserError, match="on GPUs only"):
        VLLMProcess(quantized.folder, 12, threads=2, max_running=2)


@pytest.mark.slow
@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("quantized", SERVED, indirect=True)
@torch.no_grad()
def test_greedy_texts_are_those_of_transformers_but_for_ties(quantized: Quantized) -> None:
    folder = quantized.folder / compressed_tensors.FOLDER
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    backend = VLLMProcess(quantized.folder, 12, threads=2, max_running=4)
    for prompt in TOKENS.tolist():
        (got,) = answer(backend, GREEDY, prompt[:20])
        logits = model(torch.tensor([[*prompt[:20], *got.tokens]])).logits[0, 19:-1].float()
        chosen = logits.gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
        below = (logits.amax(-1) - chosen) / spread(logits)
        assert len(got.tokens) == 20 and below.max() < TIE
    backend.close()
    backend.end()
