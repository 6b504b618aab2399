"""GGUF and compressed-tensors, read by transformers; GGUF by llama.cpp too, where it is there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lathe.config.settings import ExportSettings, Recipe
from lathe.data.gguf_tokenizer import metadata_of
from lathe.errors import StageError, UserError
from lathe.export.engines import open_engine
from lathe.export.export import export
from lathe.export.formats import compressed_tensors, gguf, write_formats
from lathe.export.formats.integers import Integers, stored_matrices
from lathe.export.prove import prove_in_engine
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gguf import import_gguf
from lathe.model.gpt import GPT
from lathe.model.quantization import INT8, LinearFormat, QuantizationPlan, WeightFormat
from tests.support.families import FAMILIES, make, save
from tests.support.small_export import make_model, write_held_out

TOKENS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(3))
PLANS: dict[str, LinearFormat | None] = {
    "float": None,
    "static": LinearFormat(),
    "static, a scale a tensor": LinearFormat(WeightFormat("abs_max")),
    "dynamic": LinearFormat(WeightFormat.grouped(64, 8), "dynamic_int8"),
    "weights alone": LinearFormat(activation=None),
    "int4": LinearFormat(WeightFormat.grouped(32, 4), "dynamic_int8"),
    "int4 in groups of 64": LinearFormat(WeightFormat.grouped(64, 4), "dynamic_int8"),
}
KIND = {8: GGMLQuantizationType.Q8_0, 4: GGMLQuantizationType.Q4_0}

Make = Callable[..., Checkpoint]


OLDER = ("llama", "mistral", "qwen2", "qwen3")
IN_GGUF = [case for case in FAMILIES if case.split(",")[0].split()[0] in OLDER]
IN_GGUF = [case for case in IN_GGUF if not {"window", "yarn", "dynamic"} & set(case.split())]
"""Those that GGUF files are written of."""


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
    """A checkpoint of a family, all of it in one format, the head too."""

    def made(case: str, plan: str, head: bool = True, **sizes: Any) -> Checkpoint:
        if case == "gpt2":
            model = make_model(GPTConfig(304, 1024, 64, 16, (4, 4), (256, 256)))
        else:
            sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 304} | sizes
            folder = save(make(case, **sizes), tmp_path / "hf", tokenizer)
            model = load_checkpoint(folder).model
        with torch.no_grad():  # so that files of float16 change nothing that is not quantized
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
    """What the checkpoint computes with, by Hugging Face's names, in float32."""
    found, family = {}, model.config.architecture
    for name, tensor in stored_matrices(model):
        value = tensor.values * tensor.spread_scales(1) if isinstance(tensor, Integers) else tensor
        found[family.stored_name(name)] = value.T if family.is_conv1d(name) else value
    return found


@pytest.mark.parametrize("plan", PLANS)
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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", [*IN_GGUF, "gpt2"])
def test_transformers_reads_the_gguf_file_that_was_written(
    case: str, plan: str, checkpoint: Make, tmp_path: Path
) -> None:
    # Of Qwen3, transformers does not read the size of a head.
    found = checkpoint(case, plan, **({"head_dim": 128} if case == "qwen3" else {}))
    written = write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    assert list(written["gguf"]["files"]) == [gguf.FILE]
    theirs = of_transformers(tmp_path, gguf_file=gguf.FILE)
    for name, value in values(found.model).items():
        if name not in theirs:  # transformers knows of no biases in this architecture
            assert name.endswith(".bias") and "with biases" in case
            continue
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-5, msg=name)
    form = PLANS[plan]
    kinds = {t.name: t.tensor_type for t in GGUFReader(tmp_path / gguf.FILE).tensors}
    expected = KIND[form.weight.bits] if form else GGMLQuantizationType.F32
    assert kinds["token_embd.weight"] == kinds["blk.1.ffn_down.weight"] == expected


@pytest.mark.parametrize("case", [*IN_GGUF, "gpt2"])
def test_a_round_trip_keeps_the_integers_and_the_tokenizer(
    case: str, checkpoint: Make, tmp_path: Path
) -> None:
    found = checkpoint(case, "int4")
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
        if isinstance(one, Integers) and isinstance(two, Integers):
            assert torch.equal(one.values, two.values), name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", IN_GGUF)
def test_transformers_computes_what_compressed_tensors_holds(
    case: str, plan: str, checkpoint: Make, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    found = checkpoint(case, plan, head=False, **({"head_dim": 16} if case == "qwen3" else {}))
    write_formats(found, tmp_path, ExportSettings(formats=["compressed-tensors"]))
    folder = tmp_path / compressed_tensors.FOLDER
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    form = PLANS[plan]
    if form is not None and form.activation == "dynamic_int8":
        for module in found.model.modules():  # inputs stay in float
            if isinstance(module, fake_quant.FakeQuantLinear):
                module.observer = None
    with torch.inference_mode():
        expected, logits = found.model(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2 * float(expected.std()))
    assert (
        AutoTokenizer.from_pretrained(folder)("a b").input_ids == found.tokenizer.encode("a b").ids
    )


@pytest.mark.parametrize("case", ["gemma3", "smollm3", "phi3", "olmo2", "starcoder2", "gpt-neox"])
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


def test_what_a_format_cannot_hold_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    both = ExportSettings(formats=["compressed-tensors"])
    with pytest.raises(UserError, match="Conv1D"):
        write_formats(checkpoint("gpt2", "float"), tmp_path, both)
    narrow = checkpoint("llama", "int4 in groups of 64", hidden_size=48)
    with pytest.raises(UserError, match=r"48 inputs of layers\.0\.self_attn\.qkv_proj"):
        write_formats(narrow, tmp_path, both)
    with_prefix = checkpoint("llama", "float")
    with_prefix.model.set_prefix([3])
    for settings in (both, ExportSettings(formats=["gguf"])):
        with pytest.raises(UserError, match="prefix of 1 tokens"):
            write_formats(with_prefix, tmp_path, settings)
    assert not list(tmp_path.glob("*.gguf")) and not (tmp_path / compressed_tensors.FOLDER).exists()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gemma3", "is a Gemma 3 model, and GGUF files are written of GPT-2, Llama"),
        ("qwen2 with a window", "has a window of 11 tokens"),
        ("qwen2, yarn", "rope_type is yarn"),
    ],
)
def test_what_gguf_files_are_not_written_of(
    case: str, message: str, checkpoint: Make, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        write_formats(checkpoint(case, "float"), tmp_path, ExportSettings(formats=["gguf"]))


def test_rows_that_do_not_fill_blocks_are_float16(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "static", intermediate_size=80)
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    kinds = {t.name: t.tensor_type for t in GGUFReader(tmp_path / gguf.FILE).tensors}
    assert kinds["blk.0.ffn_down.weight"] == GGMLQuantizationType.F16
    assert kinds["blk.0.ffn_up.weight"] == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("name", ["gguf", "compressed-tensors"])
def test_a_file_with_another_value_is_not_accepted(
    name: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = {"gguf": gguf, "compressed-tensors": compressed_tensors}[name]
    file = tmp_path / {"gguf": gguf.FILE}.get(name, "compressed-tensors/model.safetensors")
    whole = module.write

    def write(*arguments: Any) -> list[str]:
        names: list[str] = whole(*arguments)
        data = bytearray(file.read_bytes())
        data[-(len(data) // 3)] ^= 0x70
        file.write_bytes(data)
        return names

    monkeypatch.setattr(module, "write", write)
    with pytest.raises(StageError, match=f"is not in {name} what it is in the checkpoint"):
        write_formats(
            checkpoint("llama", "static"),
            tmp_path,
            ExportSettings.model_validate({"formats": [name]}),
        )


def test_a_tokenizer_without_a_name_is_refused(tokenizer: Tokenizer) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    split = pre_tokenizers.Split("h", "isolated")
    other.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    assert metadata_of(tokenizer, 300, "model")["tokenizer.ggml.pre"] == "gpt-2"
    with pytest.raises(UserError, match=r"llama\.cpp has no name for"):
        metadata_of(other, 300, "model")


def test_an_export_lists_the_formats(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "dynamic")
    formats = ExportSettings(prompts=4, new_tokens=8, formats=["gguf", "compressed-tensors"])
    data = write_held_out(tmp_path / "data")
    folder = export(Recipe(Export=formats), found.folder, data, tmp_path / "onnx").folder
    metadata = json.loads((folder / "export.json").read_text())
    for entry in metadata["formats"].values():
        for name, file in entry["files"].items():
            assert metadata["files"][name]["sha256"] == file["sha256"]
            assert (folder / name).stat().st_size == file["bytes"]


@pytest.mark.parametrize("case", [*IN_GGUF, "gpt2", "pruned"])
def test_llama_cpp_computes_what_torch_does(
    case: str, checkpoint: Make, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A pruned model is of the architecture `deci` there."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = checkpoint("llama" if case == "pruned" else case, "float")
    if case == "pruned":
        smaller = replace(
            found.model.config, n_head=(4, 2, 4), kv_heads=(2, 1, 2), n_inner=(192, 96, 64)
        )
        model = GPT(smaller)
        model.initialize(0.1, seed=0)
        found = replace(found, model=model.eval())
    write_formats(found, tmp_path, ExportSettings(formats=["gguf"]))
    with torch.inference_mode():
        expected = found.model(TOKENS[:1])[0].numpy()
    assert expected.std() > 0.1
    logits = open_engine("llama.cpp", tmp_path).logits(TOKENS[:1].numpy())[0]
    np.testing.assert_allclose(logits, expected, atol=5e-3)


def test_transformers_does_not_load_a_quantized_checkpoint_in_float(checkpoint: Make) -> None:
    with pytest.raises(ValueError, match="lathe-llama"):
        AutoModelForCausalLM.from_pretrained(checkpoint("llama", "dynamic").folder)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "transformers", "llama.cpp"])
@pytest.mark.parametrize("plan", ["float", "dynamic", "int4"])
def test_a_proof_in_an_engine(
    engine: str, plan: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "llama.cpp":
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = checkpoint("llama", plan, head_dim=16)
    formats = ExportSettings(prompts=4, new_tokens=8, formats=["gguf", "compressed-tensors"])
    recipe, data = Recipe(Export=formats), write_held_out(tmp_path / "data")
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    proof = prove_in_engine(recipe, folder, found.folder, data, engine)
    assert proof.engine.lower().startswith(engine)
    assert proof.fidelity.argmax_agreement > (0.99 if plan == "float" else 0.5)
    if engine == "transformers":
        swap_heads(folder / compressed_tensors.FOLDER / "model.safetensors")
        with pytest.raises(UserError, match="altered"):
            prove_in_engine(recipe, folder, found.folder, data, engine)
        monkeypatch.setattr("lathe.storage.artifacts.kinds.check_files", lambda *_: None)
        with pytest.raises(StageError, match="diverges from the float model"):
            prove_in_engine(recipe, folder, found.folder, data, engine)


def swap_heads(file: Path) -> None:
    """Exchange the first two query heads of a file."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".q_proj.weight" in name and not name.endswith("shape"):
            tensors[name] = torch.cat([tensor[16:32], tensor[:16], tensor[32:]])
    save_file(tensors, file, {"format": "pt"})


def test_a_proof_names_what_is_missing(checkpoint: Make, tmp_path: Path) -> None:
    found = checkpoint("llama", "float", head_dim=16)
    data = write_held_out(tmp_path / "data")
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    folder = export(recipe, found.folder, data, tmp_path / "onnx").folder
    for engine, match in (("llama.cpp", "--format gguf"), ("vllm", "use one of onnxruntime")):
        with pytest.raises(UserError) as caught:
            prove_in_engine(recipe, folder, found.folder, data, engine)
        assert match in str(caught.value)
