import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc import model_config_pb2

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import UserError
from lathe_serving.gateway.models import names_of, read_models
from lathe_serving.repository import remove_bytecode, require_whole, write_repository


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
    assert names_of([model]) == {"gpt": model, "gpt-4o-mini": model, "team/chat": model}
    with pytest.raises(UserError, match=r"Serving\.aliases: team/chat is used by both"):
        names_of([model, replace(model, name="other", aliases=("team/chat",))])
    with pytest.raises(ValidationError):
        ServingSettings(aliases=["two words"])


def test_nothing_is_left_of_a_failure(exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "r"
    write_repository(exported, output, ServingSettings(), GenerationSettings())
    with pytest.raises(UserError, match=r"no export\.json"):
        write_repository(tmp_path, output, ServingSettings(), GenerationSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (output / "gpt" / "1" / "model.onnx").is_file()


def test_what_python_compiles_in_it_is_ours(exported: Path, tmp_path: Path) -> None:
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
        with pytest.raises(UserError, match=rf"{name}: missing, truncated or modified"):
            check()
