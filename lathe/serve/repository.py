"""A Triton model repository around an exported model.

REPOSITORY/NAME/config.pbtxt      inputs, outputs, decoupled responses, default parameters
REPOSITORY/NAME/1/model.py        loads lathe.serve.backend
REPOSITORY/NAME/1/...             the export folder: model.onnx, tokenizer.json, export.json ...
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

from lathe.errors import UserError
from lathe.serve.params import FIELDS, STRATEGIES
from lathe.settings import GenerationSettings, ServingSettings
from lathe.storage import atomic_folder

MODEL_PY = Path(__file__).with_name("triton_model.py")  # only Triton itself can import it
NEEDED = ("model.onnx", "export.json", "tokenizer.json")
TRITON_TYPE = {int: "TYPE_INT64", float: "TYPE_FP32", str: "TYPE_STRING", bool: "TYPE_BOOL"}


def write_repository(
    exported: Path, output: Path, serving: ServingSettings, generation: GenerationSettings
) -> Path:
    """Write a repository with one model and return it.

    Args:
        exported: an export folder.
        output: the repository; replaced whole, or left as it was on any failure.
        generation: the defaults of requests that do not say otherwise.

    Raises:
        UserError: `exported` lacks a file, the model's name cannot be a folder's, or the server
            lacks the decode strategy.
    """
    for name in NEEDED:
        if not (exported / name).is_file():
            raise UserError(f"{exported}: no {name}", "give the output folder of `lathe export`")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", serving.model_name):
        raise UserError(
            f"Serving.model_name {serving.model_name!r} is not a plain name",
            "use letters, digits, dots, dashes and underscores",
        )
    if generation.decode_strategy not in STRATEGIES:
        raise UserError(
            f"Generation.decode_strategy {generation.decode_strategy}: the server has "
            f"{' and '.join(STRATEGIES)} only",
            f"-o Generation.decode_strategy={STRATEGIES[0]} to deploy; `lathe generate` has it",
        )
    with atomic_folder(output, "*/config.pbtxt") as work:
        model = work / serving.model_name
        shutil.copytree(exported, model / "1")
        shutil.copyfile(MODEL_PY, model / "1" / "model.py")
        (model / "config.pbtxt").write_text(_config(serving, generation))
    return output


def _config(serving: ServingSettings, generation: GenerationSettings) -> str:
    settings: dict[str, Any] = {
        "max_tokens": generation.max_dec_len,
        "max_running": serving.max_running,
        "max_queue": serving.max_queue,
        "threads": serving.threads,
        "generation": {
            "decode_strategy": generation.decode_strategy,
            "temperature": generation.temperature,
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "repetition_penalty": generation.repetition_penalty,
            "min_tokens": generation.min_dec_len,
        },
    }
    one, many = [1], [-1]
    optional = [
        {"name": name, "data_type": TRITON_TYPE[field.kind], "dims": one, "optional": True}
        for name, field in FIELDS.items()
    ]
    config = model_config_pb2.ModelConfig(
        name=serving.model_name,
        backend="python",
        max_batch_size=0,
        model_transaction_policy={"decoupled": True},
        input=[{"name": "text_input", "data_type": "TYPE_STRING", "dims": one}, *optional],
        output=[
            {"name": "text_output", "data_type": "TYPE_STRING", "dims": one},
            {"name": "tokens", "data_type": "TYPE_INT64", "dims": many},
            {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": one},
        ],
        instance_group=[{"count": 1, "kind": "KIND_CPU"}],
        parameters={key: {"string_value": json.dumps(value)} for key, value in settings.items()},
    )
    text: str = text_format.MessageToString(config)
    return text
