"""A checkpoint folder is read completely and unmodified, or rejected with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.folder import checkpoint_digest, open_folder, read_origin, training_origin
from lathe.model.gpt import GPT
from lathe_base.artifacts.metadata import Ancestor, Origin
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from lathe_base.storage.files import require_intact
from tests.support.errors import raises
from tests.support.small_models import small_config


@pytest.fixture
def folder(tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer) -> Path:
    save_checkpoint(tmp_path / "m", small_gpt, byte_tokenizer, "pretrain", Recipe(), ORIGIN)
    return tmp_path / "m"


@pytest.fixture
def hf_folder(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    byte_tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    return tmp_path / "hf"


ORIGIN = Origin(ancestors=[Ancestor(sha256=64 * "a", stage="pretrain", step=7)])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_saved_metadata_describes_the_checkpoint(folder: Path) -> None:
    meta = load_checkpoint(folder).meta
    assert (meta["stage"], meta["parent"]) == ("pretrain", ORIGIN.parent)
    assert meta["n_params"] == small_config().n_params
    names = {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert set(meta["files"]) == names
    assert {p.name for p in folder.iterdir()} == {*meta["files"], "lathe.json"}


def test_an_opened_folder_is_verified_once_and_not_before_its_tensors_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def watch(path: Path, *others: Any) -> None:
        checked.append(path)
        require_intact(path, *others)

    monkeypatch.setattr("lathe.model.folder.require_intact", watch)
    opened = open_folder(folder)
    assert opened.digest == checkpoint_digest(folder) and not checked
    first, second = load_checkpoint(opened), load_checkpoint(opened)
    assert checked == [folder] and first.digest == second.digest == opened.digest
    cut(folder / "tokenizer.json")
    assert open_folder(folder).config == opened.config
    with raises(Code.CORRUPT, "tokenizer.json"):
        load_checkpoint(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_weights_that_others_have_quantized_are_refused_by_their_method(
    method: str, hf_folder: Path
) -> None:
    path = hf_folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(values))
    hint = f"lathe import {hf_folder}" if method == "compressed-tensors" else "float checkpoint"
    with raises(Code.UNSUPPORTED, "config.json", f"of {method}", hint):
        load_checkpoint(hf_folder)


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")]
)
def test_a_file_beside_the_weights_may_say_that_they_are_quantized(
    file: str, method: str, hf_folder: Path
) -> None:
    (hf_folder / file).write_text("{}")
    with raises(Code.UNSUPPORTED, f"of {method}"):
        load_checkpoint(hf_folder)


@pytest.mark.parametrize("given", ["m.gguf", "."])
def test_a_gguf_file_has_to_be_imported_first(given: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with raises(Code.WRONG_KIND, f"lathe import {tmp_path / 'm.gguf'} --output"):
        load_checkpoint(tmp_path / given)


def test_a_readme_of_somebody_elses_stays(folder: Path, small_gpt: GPT) -> None:
    tokenizer, readme = Tokenizer.from_file(str(folder / "tokenizer.json")), folder / "README.md"
    first = readme.read_bytes()
    save_checkpoint(folder, small_gpt, tokenizer, "prune", Recipe())
    assert readme.read_bytes() != first  # the README that Lathe wrote is replaced
    readme.write_text("# My notes\n")
    save_checkpoint(folder, small_gpt, tokenizer, "prune", Recipe())
    assert readme.read_text() == "# My notes\n"
    assert "README.md" not in load_checkpoint(folder).meta["files"]


def test_a_checkpoint_of_an_earlier_version_is_read(folder: Path) -> None:
    meta = json.loads((folder / "lathe.json").read_text())
    for key in ("ancestors", "data"):
        del meta[key]
    del meta["files"]["README.md"], meta["recipe"]["Card"], meta["recipe"]["Prepare"]["license"]
    (folder / "README.md").unlink()
    (folder / "lathe.json").write_text(json.dumps(meta))
    assert load_checkpoint(folder).meta == meta
    assert [x.sha256 for x in read_origin(meta, folder).ancestors] == [ORIGIN.parent]


def test_a_model_of_the_hub_is_shown_by_its_name(tmp_path: Path, hf_folder: Path) -> None:
    folder = tmp_path / "models--openai-community--gpt2" / "snapshots" / ("c" * 40)
    folder.parent.mkdir(parents=True)
    hf_folder.rename(folder)
    origin = training_origin(folder, None)
    assert (origin.base_model, origin.ancestors[0].revision) == ("openai-community/gpt2", "c" * 40)
    assert origin.parent == checkpoint_digest(folder)


def test_truncated_weights(folder: Path, hf_folder: Path) -> None:
    for each in (folder, hf_folder):
        cut(each / "model.safetensors")
    with raises(Code.CORRUPT, folder / "model.safetensors"):
        load_checkpoint(folder)
    with raises(Code.MALFORMED, hf_folder / "model.safetensors"):
        load_checkpoint(hf_folder)


def test_an_altered_file_and_an_unfinished_folder(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("0.00001", "0.0001") + " ")
    with raises(Code.CORRUPT, config):
        load_checkpoint(folder)
    (folder / "lathe.json").unlink()
    with raises(Code.INCOMPLETE, folder, "lathe.json"):
        load_checkpoint(folder)


def test_weights_that_are_not_finite_or_do_not_fit(hf_folder: Path) -> None:
    path = hf_folder / "model.safetensors"
    weights = load_file(path)
    spoiled = {name: tensor.clone() for name, tensor in weights.items()}
    spoiled["transformer.h.1.mlp.c_fc.weight"][3, 4] = torch.nan
    save_file(spoiled, path)
    with raises(Code.NOT_FINITE, "h.1.mlp.c_fc.weight"):
        load_checkpoint(hf_folder)
    del weights["transformer.ln_f.bias"]
    save_file(weights, path)
    with raises(Code.MISMATCH, "config.json: ln_f.bias"):
        load_checkpoint(hf_folder)


def test_pickled_weights_are_never_read(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").rename(hf_folder / "pytorch_model.bin")
    with raises(
        Code.NOT_FOUND, "model.safetensors", "pytorch_model.bin, which Lathe never unpickles"
    ):
        load_checkpoint(hf_folder)


@pytest.mark.parametrize(
    ("key", "value", "code", "text"),
    [
        ("model_type", "bert", Code.UNSUPPORTED, "model_type is 'bert'"),
        ("activation_function", "relu", Code.UNSUPPORTED, "activation_function is 'relu'"),
        ("n_embd", None, Code.MISMATCH, "config.json"),
        ("vocab_size", 100, Code.MISMATCH, "config.json"),
    ],
)
def test_a_model_of_another_kind(
    hf_folder: Path, key: str, value: object, code: Code, text: str
) -> None:
    path = hf_folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {key: value if value is not None else 96}))
    with raises(code, text):
        load_checkpoint(hf_folder)


def test_a_tokenizer_with_more_ids_than_the_model(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = GPT(small_config(vocab_size=200))
    save_checkpoint(tmp_path / "m", model, byte_tokenizer, "pretrain", Recipe())
    with raises(Code.WRONG_TOKENIZER, "257 ids", "200"):
        load_checkpoint(tmp_path / "m")


def test_a_failed_save_leaves_the_checkpoint_that_was_there(
    folder: Path, small_gpt: GPT, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Tokenizer
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr("lathe.model.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(folder, small_gpt, byte_tokenizer, "prune", Recipe())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
