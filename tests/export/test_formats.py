"""Formats for other engines, read by transformers, OpenVINO GenAI and, if it is installed,
llama.cpp."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import openvino
import openvino_genai
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lathe.data.gguf_metadata import gguf_metadata
from lathe.export.engines import Engine, OpenVINOGenAI, open_engine
from lathe.export.export import export
from lathe.export.export import write as write_graph
from lathe.export.fidelity import HALF_NOISE
from lathe.export.formats import compressed_tensors, format_module, gguf, write_formats
from lathe.export.prove import prove_in_engine
from lathe.export.weight_formats import stored_matrices
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gguf import import_gguf
from lathe.model.gpt import GPT
from lathe.model.integer_weights import IntegerWeight
from lathe.model.quantization import INT8, LinearFormat, QuantizationPlan, WeightFormat
from lathe.report.cards.bom import model_bom
from lathe.report.cards.evidence import read_evidence
from lathe.report.cards.release import model_card
from lathe_base.artifacts.kinds import open_export
from lathe_base.artifacts.sampling import SamplingDefaults
from lathe_base.config.settings import ExportSettings, ProductionSettings, Recipe
from lathe_base.config.settings.serving import ExportFormat
from lathe_base.errors import Code, StageError
from lathe_base.provenance import bundle
from lathe_base.storage import sha256
from tests.support.errors import raises
from tests.support.families import FAMILIES, make, quantized, save
from tests.support.small_export import make_model, write_held_out
from tests.support.tables import quick_only

ZERO_POINTS = "int4 with zero points"
TOKENS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(3))
PLANS: dict[str, LinearFormat | None] = {
    "float": None,
    "static": LinearFormat(),
    "static, a scale a tensor": LinearFormat(WeightFormat("abs_max")),
    "dynamic": LinearFormat(WeightFormat.grouped(64, 8), "dynamic_int8"),
    "a scale a token": LinearFormat(activation="dynamic_int8"),
    "weights alone": LinearFormat(activation=None),
    "int4": LinearFormat(WeightFormat.grouped(32, 4), "dynamic_int8"),
    "int4 in groups of 64": LinearFormat(WeightFormat.grouped(64, 4), "dynamic_int8"),
    ZERO_POINTS: LinearFormat(WeightFormat.grouped(32, 4, True), "dynamic_int8"),
}
KIND = {8: GGMLQuantizationType.Q8_0, 4: GGMLQuantizationType.Q4_0}

Make = Callable[..., Checkpoint]
pytestmark = pytest.mark.usefixtures("quick_engines")


def each_once(cases: Sequence[str]) -> list[tuple[str, str]]:
    """Every family in one format, and one family in every format.

    That is enough, since the names in a file do not depend on the number format.
    """
    return [*((case, "int4") for case in cases), *((cases[0], p) for p in PLANS if p != "int4")]


OLDER = ("llama", "mistral", "qwen2", "qwen3")
IN_GGUF = [case for case in FAMILIES if case.split(",")[0].split()[0] in OLDER]
IN_GGUF = [case for case in IN_GGUF if not {"window", "yarn", "dynamic"} & set(case.split())]
"""Families that can be written as GGUF."""
AS_IN_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma3": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": None},
    "phi4 mini": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": None},
}
"""Later families, with the settings that llama.cpp assumes for them."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(
        ["the other things that they have, and the strokes of the tool"], trainer
    )
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> Make:
    """Factory of checkpoints of a family with all linears in one format, including the head."""

    def made(case: str, plan: str, head: bool = True, **sizes: Any) -> Checkpoint:
        if case == "gpt2":
            model = make_model(GPTConfig(304, 1024, 64, 16, (4, 4), (256, 256)))
        else:
            sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 304} | sizes
            folder = save(make(case, **sizes), tmp_path / "hf", tokenizer)
            model = load_checkpoint(folder).model
        with torch.no_grad():  # exact in float16 files
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        return saved(model, PLANS[plan], head)

    def saved(model: GPT, form: LinearFormat | None, head: bool) -> Checkpoint:
        if form is not None:
            names = [*model.config.linear_names(), *([HEAD] if head else [])]
            scalar = form.weight.quantize_type == "abs_max"
            forms = {n: replace(form, weight=INT8) if n == HEAD and scalar else form for n in names}
            plan = QuantizationPlan(forms)
            fake_quant.insert(model, plan)
            scales = fake_quant.calibrate(model, [TOKENS])
            model.config = model.config.with_quantization(plan.with_scales(scales))
        save_checkpoint(tmp_path / "q", model.eval(), tokenizer, "quantize", Recipe())
        return load_checkpoint(tmp_path / "q")

    return made


def values(model: GPT) -> dict[str, Tensor]:
    """Effective weights of a checkpoint in float32 by Hugging Face's names."""
    found, family = {}, model.config.architecture
    for name, tensor in stored_matrices(model):
        value = tensor.floats if isinstance(tensor, IntegerWeight) else tensor
        found[family.stored_name(name)] = value.T if family.is_conv1d(name) else value
    return found


@pytest.mark.parametrize(
    "plan", quick_only(PLANS, ["static, a scale a tensor", "dynamic", "weights alone", ZERO_POINTS])
)
def test_the_integers_are_those_of_the_fake_quantized_model(plan: str, checkpoint: Make) -> None:
    model = checkpoint("qwen3", plan).model
    for name, module in model.named_modules():
        if isinstance(module, fake_quant.FakeQuantLinear):
            own = module.quantized(module.weight)
            family = model.config.architecture
            parts = [f"{family.stored_name(x)}" for x in family.stored_names(f"{name}.weight")]
            whole = torch.cat([values(model)[part] for part in parts])
            assert torch.equal(own.sort(0).values, whole.sort(0).values)


def of_transformers(folder: Path, **more: Any) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).state_dict()


@pytest.mark.parametrize(
    ("case", "plan"),
    quick_only(
        each_once([*IN_GGUF, "gpt2"]),
        [
            ("qwen3", "int4"),
            ("gpt2", "int4"),
            ("llama", "float"),
            ("llama", "static"),
        ],
    ),
)
def test_transformers_reads_the_gguf_file_that_was_written(
    case: str, plan: str, checkpoint: Make, tmp_path: Path
) -> None:
    # transformers does not read the head size of Qwen3.
    found = checkpoint(case, plan, **({"head_dim": 128} if case == "qwen3" else {}))
    written = write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    assert written["gguf"] == [gguf.FILE]
    theirs = of_transformers(tmp_path, gguf_file=gguf.FILE)
    for name, value in values(found.model).items():
        if name not in theirs:  # transformers reads no biases for this architecture
            assert name.endswith(".bias") and "with biases" in case
            continue
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-5, msg=name)
    form = PLANS[plan]
    kinds = {t.name: t.tensor_type for t in GGUFReader(tmp_path / gguf.FILE).tensors}
    expected = KIND[form.weight.bits] if form else GGMLQuantizationType.F32
    if form and form.weight.zero_points:
        expected = GGMLQuantizationType.Q4_1
    assert kinds["token_embd.weight"] == kinds["blk.1.ffn_down.weight"] == expected


ROUND_TRIPS = [*IN_GGUF, *AS_IN_LLAMA_CPP, "gpt2"]


@pytest.mark.parametrize(
    "case", quick_only(ROUND_TRIPS, ["llama with biases, tied, llama3", "gemma3", "gpt2"])
)
def test_a_round_trip_keeps_the_integers_and_the_tokenizer(
    case: str, checkpoint: Make, tmp_path: Path
) -> None:
    found = checkpoint(case, "int4", **AS_IN_LLAMA_CPP.get(case, {}))
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")
    again = load_checkpoint(tmp_path / "again")
    assert (
        again.tokenizer.encode("a b<|endoftext|>").ids
        == found.tokenizer.encode("a b<|endoftext|>").ids
    )
    plan = found.model.config.quantization
    assert plan is not None
    fake_quant.insert(again.model, plan)
    again.model.config = again.model.config.with_quantization(plan)
    for (name, one), (_, two) in zip(
        stored_matrices(found.model), stored_matrices(again.model), strict=True
    ):
        if isinstance(one, IntegerWeight) and isinstance(two, IntegerWeight):
            assert torch.equal(one.values, two.values), name


def test_compressed_tensors_reads_zero_points(checkpoint: Make, tmp_path: Path) -> None:
    """With the package itself: transformers cannot load them."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    found = checkpoint("llama", ZERO_POINTS, head=False)
    write_formats(found, tmp_path, ExportSettings(formats=["compressed-tensors"]))
    folder = tmp_path / compressed_tensors.FOLDER
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    tensors = load_file(folder / "model.safetensors")
    linears = {name.rpartition(".")[0] for name in tensors if name.endswith("weight_zero_point")}
    assert len(linears) == 7 * found.model.config.n_layer
    for name, value in values(found.model).items():
        path = name.removesuffix(".weight")
        if path in linears:
            names = [n for n in tensors if n.startswith(f"{path}.")]
            parts = {n.rpartition(".")[2]: tensors[n] for n in names}
            theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
            torch.testing.assert_close(theirs, value, rtol=0, atol=0)
    with raises(Code.UNSUPPORTED, "zero points"):
        open_engine("transformers", tmp_path)


@pytest.mark.parametrize(
    ("case", "plan"),
    quick_only(
        [(case, plan) for case, plan in each_once(IN_GGUF) if plan != ZERO_POINTS],
        [
            ("qwen3", "int4"),
            *(("llama", x) for x in ("static", "dynamic", "a scale a token")),
        ],
    ),
)
def test_transformers_computes_what_compressed_tensors_holds(
    case: str, plan: str, checkpoint: Make, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    found = checkpoint(case, plan, head=False, **({"head_dim": 16} if case == "qwen3" else {}))
    write_formats(found, tmp_path, ExportSettings(formats=["compressed-tensors"]))
    folder = tmp_path / compressed_tensors.FOLDER
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    form = PLANS[plan]
    if form is not None and form.weight.group_size:
        for module in found.model.modules():  # inputs stay in float
            if isinstance(module, fake_quant.FakeQuantLinear):
                module.observer = None
    with torch.inference_mode():
        expected, logits = found.model(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.1
    if plan == "a scale a token":
        # Its scale of a token is the largest magnitude / 127.5, not 127 as in vLLM's kernels.
        assert (logits - expected).abs().mean() < 3e-2 * expected.std()
    else:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2 * float(expected.std()))
    assert (
        AutoTokenizer.from_pretrained(folder)("a b").input_ids == found.tokenizer.encode("a b").ids
    )


@pytest.mark.parametrize(
    "case",
    quick_only(
        ["gemma3", "smollm3", "phi3", "olmo2", "starcoder2", "gpt-neox"], ["gemma3", "gpt-neox"]
    ),
)
def test_transformers_computes_other_families_in_int4(
    case: str, checkpoint: Make, tmp_path: Path
) -> None:
    found = checkpoint(case, "int4")
    write_formats(found, tmp_path, ExportSettings(formats=["compressed-tensors"]))
    folder = tmp_path / compressed_tensors.FOLDER
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in found.model.modules():  # inputs stay in float
        if isinstance(module, fake_quant.FakeQuantLinear):
            module.observer = None
    found.model.head_input = None
    with torch.inference_mode():
        expected, logits = found.model(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2 * float(expected.std()))


def test_linears_in_different_formats(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "int4", head=False)
    config = found.model.config
    assert config.quantization is not None
    linears = dict(config.quantization.linears)
    first, second, third = config.linear_names()[:3]
    linears[first] = LinearFormat(activation_scale=0.1)
    linears[second] = LinearFormat(activation=None)
    del linears[third]
    model = GPT(replace(config, quantization=None))
    plan = QuantizationPlan(linears)
    model.load_state_dict(
        {k: v for k, v in found.model.state_dict().items() if "observer" not in k}
    )
    fake_quant.insert(model, plan)
    model.config = config.with_quantization(plan)
    mixed = replace(found, model=model.eval())
    write_formats(mixed, tmp_path, ExportSettings(formats=["compressed-tensors", "gguf"]))
    quantization = json.loads((tmp_path / compressed_tensors.FOLDER / "config.json").read_text())[
        "quantization_config"
    ]
    assert quantization["format"] == "mixed-precision"
    assert len(quantization["config_groups"]) == 3
    assert [x for x in quantization["ignore"] if x != HEAD] == [
        f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up")
    ]
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    theirs = of_transformers(tmp_path / compressed_tensors.FOLDER)
    for name in ("mlp.down_proj", "mlp.up_proj"):
        path = f"model.layers.0.{name}.weight"
        if path in theirs:
            torch.testing.assert_close(theirs[path], values(model)[path], rtol=1e-3, atol=1e-5)


def test_models_that_a_format_cannot_hold_are_rejected(checkpoint: Make, tmp_path: Path) -> None:
    both = ExportSettings(formats=["compressed-tensors"])
    with raises(Code.UNSUPPORTED, "GPT-2", "Conv1D"):
        write_formats(checkpoint("gpt2", "static"), tmp_path, both)
    narrow = checkpoint("llama", "int4 in groups of 64", hidden_size=48)
    with raises(Code.UNSUPPORTED, "48 inputs of layers.0.self_attn.qkv_proj"):
        write_formats(narrow, tmp_path, both)
    with_prefix = checkpoint("llama", "float")
    with_prefix.model.set_prefix([3])
    for settings in (both, ExportSettings(formats=["gguf"])):
        with raises(Code.UNSUPPORTED, "prefix of 1 tokens"):
            write_formats(with_prefix, tmp_path, settings)
    window = checkpoint("qwen2 with a window", "float")
    with raises(Code.UNSUPPORTED, "window of 11 tokens"):
        write_formats(window, tmp_path, ExportSettings(formats=["openvino"]))
    assert not list(tmp_path.glob("*.gguf")) and not (tmp_path / compressed_tensors.FOLDER).exists()


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("opt", ("OPT", "GPT-2, Gemma 3, Llama")),
        ("gemma3", ("full attention", "sixth layer")),
        ("smollm3", ("positions", "fourth layer")),
        ("starcoder2", ("window of 11 tokens",)),
        ("qwen2 with a window", ("window of 11 tokens",)),
        ("qwen2, yarn", ("rope_type is yarn",)),
    ],
)
def test_models_that_gguf_does_not_support(
    case: str, texts: tuple[str, ...], checkpoint: Make, tmp_path: Path
) -> None:
    with raises(Code.UNSUPPORTED, *texts):
        write_formats(checkpoint(case, "float"), tmp_path, ExportSettings(formats=["gguf"]))


def gguf_values(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.parametrize(("plan", "dtype", "expected"), [
    ("float", "float32", LlamaFileType.ALL_F32),
    ("float", "float16", LlamaFileType.MOSTLY_F16),
    ("static", "float32", LlamaFileType.MOSTLY_Q8_0),
    ("int4", "float32", LlamaFileType.MOSTLY_Q4_0),
])  # fmt: skip
def test_the_file_type_is_that_of_most_matrices(
    plan: str, dtype: Any, expected: LlamaFileType, checkpoint: Make, tmp_path: Path
) -> None:
    write_formats(
        checkpoint("llama", plan), tmp_path, ExportSettings(formats=["gguf"], dtype=dtype)
    )
    assert gguf_values(tmp_path / gguf.FILE)["general.file_type"] == expected


def test_matrices_that_do_not_fill_blocks_make_a_file_of_float16(
    checkpoint: Make, tmp_path: Path
) -> None:
    found = checkpoint("llama", "static", hidden_size=48, intermediate_size=80)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    assert gguf_values(tmp_path / gguf.FILE)["general.file_type"] == LlamaFileType.MOSTLY_F16


def test_every_end_of_a_text_is_written(
    checkpoint: Make, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    found = checkpoint("llama", "float")
    texts = ["<|im_end|>", "<a>", "<|eot_id|>", "<b>", "<c>"]
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens(texts)
    ids = [extended.token_to_id(text) for text in texts]
    found.model.config = replace(found.model.config, end_ids=tuple(ids))
    found = replace(found, tokenizer=extended)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf", "compressed-tensors"]))
    values = gguf_values(tmp_path / gguf.FILE)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    assert [values[key] for key in keys] == [ids[0], ids[1], ids[3]]
    # llama.cpp recognizes <|eot_id|> and <|endoftext|> by their texts.
    assert "<c> end a text too" in caplog.text and "<|eot_id|>" not in caplog.text
    assert set(values["tokenizer.ggml.eos_token_ids"]) == set(found.end_ids)
    import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")
    assert set(load_checkpoint(tmp_path / "again").end_ids) == set(found.end_ids)
    generation = GenerationConfig.from_pretrained(tmp_path / compressed_tensors.FOLDER)
    assert generation.eos_token_id == list(found.end_ids)


SAMPLING = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


def test_recommended_sampling_is_in_every_format(
    checkpoint: Make, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 304}
    folder = save(make("llama", **sizes), tmp_path / "plain", tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(SAMPLING | {"max_length": 9}))
    loaded = load_checkpoint(folder)
    save_checkpoint(tmp_path / "kept", loaded.model, loaded.tokenizer, "prune", Recipe())
    found = load_checkpoint(tmp_path / "kept")
    in_openvino(found, tmp_path)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf", "compressed-tensors"]))
    theirs = GenerationConfig.from_pretrained(tmp_path / compressed_tensors.FOLDER)
    genai = openvino_genai.GenerationConfig(str(tmp_path / "openvino/generation_config.json"))
    values = gguf_values(tmp_path / gguf.FILE)
    for name, key in {**GGUF_SAMPLING, "do_sample": None}.items():
        assert getattr(theirs, name) == SAMPLING[name]
        if name != "min_p":  # unknown to OpenVINO GenAI in some versions
            assert getattr(genai, name) == pytest.approx(SAMPLING[name])
        if key:
            assert values[f"general.sampling.{key}"] == pytest.approx(SAMPLING[name])
    import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").model.config.sampling.to_json() == SAMPLING


GGUF_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def test_a_greedy_model_is_greedy_in_llama_cpp(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "float")
    sampling = SamplingDefaults(do_sample=False)
    found.model.config = replace(found.model.config, sampling=sampling)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    assert gguf_values(tmp_path / gguf.FILE)["general.sampling.temp"] == 0
    import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").model.config.sampling == sampling


def test_an_invalid_sampling_parameter_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save(make("llama"), tmp_path / "plain", tokenizer)
    (folder / "generation_config.json").write_text('{"top_p": 1.5}')
    with raises(Code.MALFORMED, folder / "generation_config.json", "top_p"):
        load_checkpoint(folder)


def test_rows_that_do_not_fill_blocks_are_float16(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "static", intermediate_size=80)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    kinds = {t.name: t.tensor_type for t in GGUFReader(tmp_path / gguf.FILE).tensors}
    assert kinds["blk.0.ffn_down.weight"] == GGMLQuantizationType.F16
    assert kinds["blk.0.ffn_up.weight"] == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("name", get_args(ExportFormat))
def test_scales_of_the_kv_cache_are_in_the_checkpoint_alone(
    name: ExportFormat, checkpoint: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Engines have caches of their own, and refuse tensors that they do not know."""
    model = quantized(checkpoint("llama", "float").model, int8_cache=True)
    save_checkpoint(tmp_path / "cached", model, tokenizer, "quantize", Recipe())
    found, settings = load_checkpoint(tmp_path / "cached"), ExportSettings(formats=[name])
    write_graph(found, tmp_path, settings)
    write_formats(found, tmp_path, settings)
    written = {tensor for tensor, _ in format_module(name).read(tmp_path, model.config)}
    assert written == {tensor for tensor, _ in stored_matrices(model)}
    assert not any("cached" in tensor for tensor in written)


@pytest.mark.parametrize("name", ["gguf", "compressed-tensors", "openvino"])
def test_a_file_with_another_value_is_not_accepted(
    name: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = format_module(name)
    files = {
        "gguf": gguf.FILE,
        "compressed-tensors": "compressed-tensors/model.safetensors",
        "openvino": "openvino/openvino_model.bin",
    }
    file = tmp_path / files[name]
    whole = module.write

    def write(*arguments: Any) -> list[str]:
        names: list[str] = whole(*arguments)
        data = bytearray(file.read_bytes())
        data[-(len(data) // 3)] ^= 0x70
        file.write_bytes(data)
        return names

    monkeypatch.setattr(module, "write", write)
    found, settings = (
        checkpoint("llama", "static"),
        ExportSettings.model_validate({"formats": [name]}),
    )
    write_graph(found, tmp_path, settings)
    with raises(Code.NOT_PROVED, f" in {name} ", kind=StageError):
        write_formats(found, tmp_path, settings)


def test_a_tokenizer_without_a_name_is_refused(tokenizer: Tokenizer) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    split = pre_tokenizers.Split("h", "isolated")
    other.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    assert gguf_metadata(tokenizer, 300, "model")["tokenizer.ggml.pre"] == "gpt-2"
    with raises(Code.UNSUPPORTED, "model: llama.cpp"):
        gguf_metadata(other, 300, "model")


@pytest.mark.slow
def test_an_export_lists_the_formats(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "dynamic")
    settings = {"prompts": 4, "new_tokens": 8, "formats": list(get_args(ExportFormat))}
    recipe = Recipe(Export=ExportSettings.model_validate(settings))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    evidence, metadata = read_evidence(found.folder, exported=folder), open_export(folder)
    card, bom = model_card(evidence), json.loads(model_bom(evidence))
    listed = {x["name"]: x["hashes"] for x in bom["metadata"]["component"]["components"]}
    for name in metadata.formats:
        for file, entry in metadata.format_files(name).items():
            assert (folder / file).stat().st_size == entry.bytes
            assert sha256(folder / file) == entry.sha256 == listed[file][0]["content"]
            assert f"`{file}`, SHA-256 `{entry.sha256}`" in card
    for command in (
        "ollama create",
        "vllm serve ./compressed-tensors",
        "ovms --model_path ./openvino",
    ):
        assert command in card
    assert "or on GPUs with vLLM (`Serving.runtime`)" in card
    assert "verified in transformers 5" in card and "verified in openvino-genai 2026" in card


IN_OPENVINO = [case for case in FAMILIES if "window" not in case]
IN_OPENVINO = [x for x in IN_OPENVINO if x not in ("gemma3", "phi3", "starcoder2")]
"""Families without a window, which paged attention does not read from the file."""


def in_openvino(found: Checkpoint, folder: Path) -> OpenVINOGenAI:
    settings = ExportSettings(formats=["openvino"])
    write_graph(found, folder, settings)
    write_formats(found, folder, settings)
    return OpenVINOGenAI(folder)


QUICK = ("qwen3",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in [*IN_OPENVINO, "gpt2"]
    ],
)
def test_openvino_genai_computes_what_torch_does(
    case: str, checkpoint: Make, tmp_path: Path
) -> None:
    found = checkpoint(case, "float")
    engine = in_openvino(found, tmp_path)
    with torch.inference_mode():
        expected = found.model(TOKENS[:1]).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(engine.logits(TOKENS[:1].numpy()), expected, atol=5e-3)
    prompt = TOKENS[0].tolist()
    assert engine.greedy(prompt, 12) == Engine.greedy(engine, prompt, 12)
    assert (
        engine.encode("they have  a tool, 12 é\n")
        == found.tokenizer.encode("they have  a tool, 12 é\n").ids
    )


@pytest.mark.parametrize(
    "plan",
    [
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("static", "dynamic", "a scale a token")
        ),
        "int4 in groups of 64",
    ],
)
def test_openvino_keeps_the_integers(plan: str, checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama with biases, tied, llama3", plan)
    engine = in_openvino(found, tmp_path)
    form = PLANS[plan]
    with torch.inference_mode():
        expected = found.model(TOKENS[:1]).numpy()
    error = np.abs(engine.logits(TOKENS[:1].numpy()) - expected).mean()
    assert error < (0.1 if form and form.activation else 1e-3) * expected.std()
    kinds = Counter(
        x.get_element_type().get_type_name()
        for x in openvino.Core().read_model(tmp_path / "openvino/openvino_model.xml").get_ops()
        if x.get_type_name() == "Constant" and len(x.shape) > 1 and x.shape[0] > 60
    )
    wanted = "f32" if form is None else f"i{form.weight.bits}"
    assert kinds[wanted] >= 12, kinds


WIDTHS: dict[str, Any] = {"n_head": (4, 2, 4), "kv_heads": (2, 1, 2), "n_inner": (192, 96, 64)}
HIDDEN_SIZE = {"n_embd": 50}
"""No multiple of the number of heads, whose features do not add up to it."""


def pruned(config: GPTConfig, shape: Mapping[str, Any] = WIDTHS) -> GPT:
    """A random model of another shape, by default one whose layers differ in width."""
    model = GPT(replace(config, **shape))
    model.initialize(0.1, seed=0)
    return model.eval()


@pytest.mark.parametrize("case", ["llama", "llama with biases, tied, llama3", "mistral"])
def test_a_pruned_model_comes_back_from_gguf(case: str, checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint(case, "float")
    found = replace(found, model=pruned(found.model.config))
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    assert gguf_values(tmp_path / gguf.FILE)["deci.attention.head_count"] == [4, 2, 4]
    import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")
    again = load_checkpoint(tmp_path / "again").model
    assert again.config.n_inner == (192, 96, 64) and again.config.n_kv_head == (2, 1, 2)
    with torch.inference_mode():
        torch.testing.assert_close(again(TOKENS), found.model(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["gpt2", "qwen2", "phi3", "olmo2", "starcoder2"])
@pytest.mark.parametrize("shape", [HIDDEN_SIZE, {"n_head": (2, 2), "kv_heads": (1, 1)}])
def test_heads_that_do_not_add_up_to_the_hidden_size_are_not_in_gguf(
    case: str, shape: dict[str, Any], checkpoint: Make, tmp_path: Path
) -> None:
    """llama.cpp could not load such a file: its matrices have the hidden size there."""
    found = checkpoint(case, "float", num_hidden_layers=2, **AS_IN_LLAMA_CPP.get(case, {}))
    if not found.model.config.kv_heads:
        shape = {name: x for name, x in shape.items() if name != "kv_heads"}
    found = replace(found, model=pruned(found.model.config, shape))
    with raises(Code.UNSUPPORTED, found.model.config.architecture.title, "features together"):
        write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))


def test_layers_without_attention_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "float")
    found = replace(found, model=pruned(found.model.config))
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    reader = GGUFReader(tmp_path / gguf.FILE, "r+")
    field = reader.fields["deci.attention.head_count"]
    field.parts[field.data[1]][0] = 0
    reader.data.flush()
    with raises(Code.UNSUPPORTED, tmp_path / gguf.FILE, "n_head of layer 1 is 0"):
        import_gguf(Recipe(), tmp_path / gguf.FILE, tmp_path / "again")


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *((case, {}) for case in (*IN_GGUF, *AS_IN_LLAMA_CPP, "gpt2")),
        ("llama", WIDTHS),
        *((case, HIDDEN_SIZE) for case in ("llama", "mistral", "qwen3", "smollm3", "gemma3")),
    ],
)
def test_llama_cpp_computes_what_torch_does(
    case: str, shape: dict[str, Any], checkpoint: Make, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """llama.cpp runs models whose layers differ with the architecture `deci`."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = checkpoint(case, "float", **AS_IN_LLAMA_CPP.get(case, {}))
    if shape:
        found = replace(found, model=pruned(found.model.config, shape))
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    with torch.inference_mode():
        expected = found.model(TOKENS[:1])[0].numpy()
    assert expected.std() > 0.1
    logits = open_engine("llama.cpp", tmp_path).logits(TOKENS[:1].numpy())[0]
    np.testing.assert_allclose(logits, expected, atol=5e-3)


def test_transformers_does_not_load_a_quantized_checkpoint_in_float(checkpoint: Make) -> None:
    with pytest.raises(ValueError, match="lathe-llama"):
        AutoModelForCausalLM.from_pretrained(checkpoint("llama", "dynamic").folder)


FORMAT = {
    "transformers": "compressed-tensors",
    "llama.cpp": "gguf",
    "openvino-genai": "openvino",
}
"""Format that each engine reads, other than the ONNX graph."""


@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        ("onnxruntime", "float"),
        ("openvino", "dynamic"),
        pytest.param("openvino-genai", "int4", marks=pytest.mark.slow),
        ("transformers", "int4"),
        ("llama.cpp", "float"),
        ("llama.cpp", "int4"),
    ],
)
def test_a_proof_in_an_engine(engine: str, plan: str, checkpoint: Make, tmp_path: Path) -> None:
    if engine == "llama.cpp":
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    made = checkpoint("llama", plan, head_dim=16)
    formats = [FORMAT[engine]] if engine in FORMAT else []
    settings = {"prompts": 4, "new_tokens": 8, "formats": formats}
    recipe = Recipe(Export=ExportSettings.model_validate(settings))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, made.folder, data, tmp_path / "onnx").folder
    proof = prove_in_engine(recipe, folder, made.folder, data, engine)
    assert proof.engine.lower().startswith(engine)
    assert proof.fidelity.argmax_agreement > (0.99 if plan == "float" else 0.5)
    change = proof.fidelity.perplexity / proof.fidelity.float_perplexity - 1
    assert abs(change) < (1e-4 if plan == "float" else 0.1)
    own = bundle.read(folder)[0].statement
    for form, found in open_export(folder).formats.items():
        assert found.proof and found.proof.engine == proof.engine
        assert own.result(f"proof:{form}")["kl"] == found.proof.kl


@pytest.mark.parametrize(
    "engine",
    ["onnxruntime", pytest.param("openvino-genai", marks=pytest.mark.slow), "transformers"],
)
def test_a_model_in_float16_is_proven(
    engine: str, checkpoint: Make, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = checkpoint("llama", "float", head_dim=16).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3**0.5)  # values not representable in float16
    save_checkpoint(tmp_path / "made", model, tokenizer, "pretrain", Recipe())
    formats = [FORMAT[engine]] if engine in FORMAT else []
    settings = {"prompts": 4, "new_tokens": 8, "formats": formats, "dtype": "float16"}
    recipe = Recipe(Export=ExportSettings.model_validate(settings))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, tmp_path / "made", data, tmp_path / "onnx").folder
    proof = prove_in_engine(recipe, folder, tmp_path / "made", data, engine)
    assert proof.fidelity.kl < proof.fidelity.noise == HALF_NOISE


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    quick_only(["a flipped byte", "permuted heads", "a swapped scale"], ["permuted heads"]),
)
def test_a_wrong_file_is_refused_by_name(
    wrong: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkpoint("llama", "static", head_dim=16)
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8, formats=["compressed-tensors"]))
    data = write_held_out(tmp_path / "data")
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    file = folder / compressed_tensors.FOLDER / "model.safetensors"
    query = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    if wrong == "permuted heads":
        tensors[query] = torch.cat(
            [tensors[query][16:32], tensors[query][:16], tensors[query][32:]]
        )
    elif wrong == "a swapped scale":
        tensors[f"{query}_scale"] = tensors[f"{query}_scale"].flip(0)
    else:
        tensors[query].view(torch.uint8)[0, 0] ^= 0x40
    save_file(tensors, file, {"format": "pt"})
    prove = partial(prove_in_engine, recipe, folder, found.folder, data, "transformers")
    with raises(Code.CORRUPT, file):
        prove()
    monkeypatch.setattr("lathe_base.artifacts.kinds.check_files", lambda *_: None)
    with raises(
        Code.NOT_PROVED, "layers.0.self_attn.q_proj.weight in compressed-tensors", kind=StageError
    ):
        prove()
    monkeypatch.setattr("lathe.export.prove.require_values", lambda *_: None)
    if wrong == "permuted heads":
        with raises(Code.NOT_PROVED, folder, "diverges", kind=StageError):
            prove()


def test_an_engine_that_is_not_installed_proves_nothing(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)  # also in the engine's process
    found, data = checkpoint("llama", "float"), write_held_out(tmp_path / "data")
    settings = ExportSettings(prompts=4, new_tokens=8, formats=["gguf"])
    folder = export(Recipe(Export=settings), found.folder, data, tmp_path / "onnx").folder
    assert open_export(folder).formats["gguf"].proof is None
    asked = Recipe(Export=settings, Production=ProductionSettings(require=["proof:gguf"]))
    with raises(Code.NOT_INSTALLED, "llama.cpp"):
        export(asked, found.folder, data, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_proof_names_unlisted_files_and_formats_that_it_does_not_compare(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = checkpoint("llama", "float", head_dim=16)
    data = write_held_out(tmp_path / "data")
    formats: list[ExportFormat] = ["gguf", "compressed-tensors"]
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8, formats=formats))
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    prove = partial(prove_in_engine, recipe, folder, found.folder, data)
    caplog.clear()
    prove("transformers")
    assert "export.json did not list" not in caplog.text
    assert "transformers does not compare gguf (--engine llama.cpp)" in caplog.text
    template = "compressed-tensors/chat_template.jinja"  # transformers reads it
    (folder / template).write_text("{{ messages }}")
    caplog.clear()
    prove("onnxruntime")
    assert f"export.json did not list {template}" in caplog.text
    assert "compressed-tensors (--engine transformers)" in caplog.text


def test_a_proof_names_what_is_missing(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "float", head_dim=16)
    data = write_held_out(tmp_path / "data")
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    for engine, code, texts in (
        ("llama.cpp", Code.INCOMPLETE, (folder, "--format gguf")),
        ("sglang", Code.UNKNOWN_NAME, ("sglang", "onnxruntime")),
    ):
        with raises(code, *texts):
            prove_in_engine(recipe, folder, found.folder, data, engine)
