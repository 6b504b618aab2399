import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2

from lathe_base.artifacts.sampling import sampling_defaults
from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code
from lathe_base.parameters import Params
from lathe_serving.gateway.triton import models_by_name, read_models
from lathe_serving.repository import remove_bytecode, require_whole, write_repository
from lathe_serving.runtime.protocol import parse
from tests.support.errors import raises
from tests.support.small_export import UNIFORM, make_model, write_unproven


def test_the_repository_is_whole(exported: Path, tmp_path: Path) -> None:
    serving = ServingSettings(model_name="tiny")
    repository = write_repository(exported, tmp_path / "r", serving, GenerationSettings())
    version = repository / "tiny" / "1"
    assert {path.name for path in version.iterdir()} >= {"model.py", "model.onnx", "tokenizer.json"}
    assert (version / "model.onnx").read_bytes() == (exported / "model.onnx").read_bytes()
    text = (repository / "tiny" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend) == ("tiny", "python")
    assert config.model_transaction_policy.decoupled
    assert [i.name for i in config.input][:2] == ["text_input", "input_ids"]
    assert all(i.optional for i in config.input)  # the backend requires one of the two
    assert config.parameters["max_tokens"].string_value == "200"


def test_the_gateway_knows_a_models_other_names(exported: Path, tmp_path: Path) -> None:
    serving = ServingSettings(aliases=["gpt-4o-mini", "team/chat"])
    output = write_repository(exported, tmp_path / "r", serving, GenerationSettings())
    model = read_models(output)["gpt"]
    assert models_by_name([model]) == {"gpt": model, "gpt-4o-mini": model, "team/chat": model}
    with raises(Code.DUPLICATE, "Serving.aliases: team/chat", "other"):
        models_by_name([model, replace(model, name="other", aliases=("team/chat",))])
    with pytest.raises(ValidationError):
        ServingSettings(aliases=["two words"])


FULL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("recommended", "recipe", "expected"),
    [
        (FULL, {}, FULL | {"decode_strategy": "sampling"}),
        (FULL, {"temperature": 1.0, "top_k": 50}, FULL | {"temperature": 1.0, "top_k": 50}),
        ({}, {}, {"temperature": 1.0, "top_k": 50, "top_p": 0.75}),
        ({"top_k": -1, "temperature": 2.5}, {}, {"top_k": 0, "temperature": 2.5}),
        (FULL | {"do_sample": False}, {}, {"decode_strategy": "greedy_search"}),
        ({"temperature": 0.0}, {}, {"decode_strategy": "greedy_search"}),
        ({"do_sample": False}, {"num_return_sequences": 2}, {"decode_strategy": "sampling"}),
        ({"do_sample": False}, {"decode_strategy": "sampling"}, {"decode_strategy": "sampling"}),
        (FULL, {"decode_strategy": "beam_search"}, {"min_p": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_defaults_are_the_recipes_or_else_those_that_the_models_authors_recommend(
    recommended: dict[str, Any],
    recipe: dict[str, Any],
    expected: dict[str, Any],
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    config = replace(UNIFORM, sampling=sampling_defaults(recommended, "the model"))
    write_unproven(make_model(config), byte_tokenizer, tmp_path / "onnx")
    output = write_repository(
        tmp_path / "onnx", tmp_path / "r", ServingSettings(), GenerationSettings(**recipe)
    )
    text = (output / "gpt" / "config.pbtxt").read_text()
    written = text_format.Parse(text, model_config_pb2.ModelConfig()).parameters["generation"]
    defaults = parse(json.loads(written.string_value), Params())
    assert {name: getattr(defaults, name) for name in expected} == expected
    (listed,) = (model.to_json("gpt") for model in read_models(output).values())
    given = {name: value for name, value in recommended.items() if name != "do_sample"}
    greedy = {"temperature": 0.0} if recommended.get("do_sample") is False else {}
    assert listed["generation_config"] == given | greedy


def test_nothing_is_left_of_a_failure(exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "r"
    write_repository(exported, output, ServingSettings(), GenerationSettings())
    with raises(Code.WRONG_KIND, tmp_path, "export.json"):
        write_repository(tmp_path, output, ServingSettings(), GenerationSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (output / "gpt" / "1" / "model.onnx").is_file()


def test_compiled_python_files_count_as_ours(exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "r"
    write_repository(exported, output, ServingSettings(), GenerationSettings())
    compiled = output / "gpt" / "1" / "__pycache__" / "model.cpython-311.pyc"
    for check in (
        lambda: write_repository(exported, output, ServingSettings(), GenerationSettings()),
        lambda: remove_bytecode(output),
    ):
        compiled.parent.mkdir()
        compiled.write_bytes(b"compiled")
        check()
        assert not compiled.parent.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("name", ["model.onnx", "config.json", "tokenizer.json"])
def test_a_flipped_byte_is_not_served(exported: Path, tmp_path: Path, name: str) -> None:
    copy, output = tmp_path / "copy", tmp_path / "r"
    shutil.copytree(exported, copy)
    write_repository(copy, output, ServingSettings(), GenerationSettings())
    for folder, check in (
        (copy, lambda: write_repository(copy, output, ServingSettings(), GenerationSettings())),
        (output / "gpt" / "1", lambda: require_whole(output)),
    ):
        damaged = folder / name
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with raises(Code.CORRUPT, name):
            check()
