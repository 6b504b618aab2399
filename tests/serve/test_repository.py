from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from lathe.errors import UserError
from lathe.serve.repository import write_repository
from lathe.settings import GenerationSettings, ServingSettings


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
    assert [i.name for i in config.input if not i.optional] == ["text_input"]
    assert config.parameters["max_tokens"].string_value == "200"


def test_nothing_is_left_of_a_failure(exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "r"
    write_repository(exported, output, ServingSettings(), GenerationSettings())
    with pytest.raises(UserError, match=r"no model\.onnx"):
        write_repository(tmp_path, output, ServingSettings(), GenerationSettings())
    with pytest.raises(UserError, match=r"'\.\./x' is not a plain name"):
        write_repository(exported, output, ServingSettings(model_name="../x"), GenerationSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (output / "gpt" / "1" / "model.onnx").is_file()
