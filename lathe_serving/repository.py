"""Writes the Triton model repository of an export.

REPOSITORY/NAME/config.pbtxt      inputs, outputs, decoupled responses, default parameters
REPOSITORY/NAME/1/model.py        loads lathe_serving.backend
REPOSITORY/NAME/1/...             the export folder: model.onnx, tokenizer.json, export.json ...
REPOSITORY/NAME-score/...         loads lathe_serving.score_backend, on the same export folder
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

from lathe_base.artifacts.kinds import (
    EXPORT,
    REPOSITORY,
    check_files,
    checked,
    open_export,
    read_json,
)
from lathe_base.artifacts.metadata import ExportMetadata, Files
from lathe_base.artifacts.sampling import sampling_defaults
from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code, UserError
from lathe_base.parameters import FIELDS
from lathe_base.storage import atomic_folder
from lathe_base.storage.files import files_below
from lathe_base.storage.ownership import bytecode, remove_files
from lathe_serving.runtime.protocol import PROMPTS, TEXTS, TOKENS, VLLM_FORMAT, score_name

# Only Triton itself can import them.
MODEL_PY = Path(__file__).with_name("triton_model.py")
SCORE_PY = Path(__file__).with_name("triton_score.py")
NEEDED = ("model.onnx", "config.json", "tokenizer.json")
TRITON_TYPE = {int: "TYPE_INT64", float: "TYPE_FP32", str: "TYPE_STRING", bool: "TYPE_BOOL"}


def write_repository(
    exported: Path, output: Path, serving: ServingSettings, generation: GenerationSettings
) -> Path:
    """Write and return a repository with a model that generates and one that scores.

    Args:
        exported: an export folder.
        output: the repository; replaced atomically, and unchanged after any failure.
        generation: the defaults of request parameters; where it was not given any, those of the
            model's `generation_config.json` come first.

    Raises:
        UserError: a file of `exported` is missing or altered.
    """
    return write_models({serving.model_name: exported}, output, serving, generation)


def write_models(
    exports: Mapping[str, Path],
    output: Path,
    serving: ServingSettings,
    generation: GenerationSettings,
) -> Path:
    """Like `write_repository`, with a pair of models for each export.

    Args:
        exports: export folders by the names of their models, which replace `serving.model_name`.
    """
    # All are checked before anything is written.
    opened = {name: _open(exported, serving) for name, exported in exports.items()}
    with atomic_folder(output, REPOSITORY) as work:
        for name, exported in exports.items():
            metadata, settings = opened[name], serving.model_copy(update={"model_name": name})
            # The model that generates: the export, beside the code and settings that load it.
            model = work / name / "1"
            model.mkdir(parents=True)
            for file in (EXPORT.metadata_file, *(metadata.files or NEEDED)):
                (model / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(exported / file, model / file)
            shutil.copyfile(MODEL_PY, model / "model.py")
            defaults = _defaults(generation, exported)
            config = _config(settings, generation.max_dec_len, defaults, metadata.sha256)
            (model.parent / "config.pbtxt").write_text(config, encoding="utf-8")
            # The model that scores has no files: it reads those of the other.
            scores = work / score_name(name) / "1"
            scores.mkdir(parents=True)
            shutil.copyfile(SCORE_PY, scores / "model.py")
            config = _score_config(settings, metadata.sha256)
            (scores.parent / "config.pbtxt").write_text(config, encoding="utf-8")
        written = json.dumps({"kind": REPOSITORY.name})
        (work / REPOSITORY.metadata_file).write_text(written, encoding="utf-8")
    return output


def served_runtimes(repository: Path) -> set[str]:
    """The runtimes of the models in a repository, as in `Serving.runtime`."""
    runtimes = set[str]()
    for path in repository.glob("*/config.pbtxt"):
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
        if "runtime" in config.parameters:  # which a scoring model has not
            runtimes.add(json.loads(config.parameters["runtime"].string_value))
    return runtimes


def _open(exported: Path, serving: ServingSettings) -> ExportMetadata:
    metadata = open_export(exported)
    if serving.runtime == "vllm" and VLLM_FORMAT not in metadata.formats:
        raise UserError(
            f"{exported}: has no {VLLM_FORMAT}, which the runtime vllm loads",
            f"export the model with Export.formats=[{VLLM_FORMAT}], or set Serving.runtime to "
            "onnxruntime, openvino or auto",
            Code.INCOMPLETE,
        )
    for name in NEEDED:
        if not (exported / name).is_file():
            raise UserError(
                f"{exported}: no {name}",
                "give the output folder of `lathe export`",
                Code.WRONG_KIND,
            )
    return metadata


def require_whole(repository: Path) -> None:
    """Check the files of a repository against the list in its metadata.

    Raises:
        UserError: no such repository, or a file has been altered since.
    """
    if not repository.is_dir():
        raise UserError(f"{repository}: no such folder", "deploy the model again", Code.NOT_FOUND)
    if (metadata := repository / REPOSITORY.metadata_file).is_file():  # earlier versions wrote none
        listed = read_json(metadata, "deploy the model again").get("files")
        files = checked(listed, Files, f"{metadata}: files", "deploy the model again")
        check_files(repository, REPOSITORY.metadata_file, files, "deploy the model again")


def remove_bytecode(repository: Path) -> None:
    """Delete Triton's Python bytecode, which would change the digest that names the release."""
    names = [name for name, _ in files_below(repository)]
    compiled = bytecode(repository, names)
    remove_files(repository, [str(path.relative_to(repository)) for path in compiled])


def _defaults(generation: GenerationSettings, exported: Path) -> dict[str, Any]:
    """The defaults of request parameters: the recipe's if it sets them, or else those that the
    model's authors recommend, or else the settings' own."""
    config = exported / "config.json"
    ours = read_json(config, "export the model again").get("lathe", {})
    sampling = sampling_defaults(ours.get("sampling", {}), f"{config}: sampling")
    generation = sampling.complete(generation)
    values = {
        name: getattr(generation, about.recipe)
        for name, about in FIELDS.items()
        if about.recipe is not None and name != "max_tokens"  # which the context limits, too
    }
    if sampling.min_p is not None and generation.decode_strategy != "beam_search":
        values["min_p"] = sampling.min_p
    return values


def _config(
    serving: ServingSettings, max_tokens: int, defaults: dict[str, Any], digest: str
) -> str:
    settings: dict[str, Any] = {
        "sha256": digest,
        "max_tokens": max_tokens,
        "max_running": serving.max_running,
        "max_queue": serving.max_queue,
        "prefix_cache_mib": serving.prefix_cache_mib,
        "speculation": serving.speculation,
        "runtime": serving.runtime,
        "max_wait_seconds": serving.max_wait_seconds,
        "aliases": serving.aliases,
        "threads": serving.threads,
        "generation": defaults,
    }
    # Outputs have an element per sequence or per token. The last seven come only when there is
    # something to say: at a sequence's end, and with log-probabilities.
    one, many = [1], [-1]
    optional: list[dict[str, Any]] = [
        {"name": name, "data_type": TRITON_TYPE[field.kind], "dims": one, "optional": True}
        for name, field in FIELDS.items()
    ]
    text, ids = PROMPTS
    inputs = [
        {"name": text, "data_type": "TYPE_STRING", "dims": one, "optional": True},
        {"name": ids, "data_type": "TYPE_INT64", "dims": many, "optional": True},
        *optional,
    ]
    outputs = [
        {"name": "text_output", "data_type": "TYPE_STRING", "dims": many},
        {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": many},
        {"name": "sequence", "data_type": "TYPE_INT64", "dims": many},
        {"name": "token_count", "data_type": "TYPE_INT64", "dims": many},
        {"name": "tokens", "data_type": "TYPE_INT64", "dims": many},
        {"name": "log_probabilities", "data_type": "TYPE_FP32", "dims": many},
        {"name": "prompt_token_count", "data_type": "TYPE_INT64", "dims": many},
        {"name": "cached_token_count", "data_type": "TYPE_INT64", "dims": many},
        {"name": "token_names", "data_type": "TYPE_STRING", "dims": many},
        {"name": "text_lengths", "data_type": "TYPE_INT64", "dims": many},
        {"name": "top_count", "data_type": "TYPE_INT64", "dims": many},
        {"name": "top_names", "data_type": "TYPE_STRING", "dims": many},
        {"name": "top_log_probabilities", "data_type": "TYPE_FP32", "dims": many},
    ]
    # vLLM finds its devices itself.
    kind = "KIND_MODEL" if serving.runtime == "vllm" else "KIND_CPU"
    return _pbtxt(serving.model_name, settings, inputs, outputs, is_decoupled=True, kind=kind)


def _score_config(serving: ServingSettings, digest: str) -> str:
    settings = {
        "sha256": digest,
        "exported": f"{serving.model_name}/1",
        "threads": serving.threads,
    }
    table = [-1, -1]
    inputs = [
        {"name": name, "data_type": kind, "dims": dims, "optional": True}
        for names, kind, dims in ((TOKENS, "TYPE_INT64", table), (TEXTS, "TYPE_STRING", [1]))
        for name in names
    ]
    outputs = [
        {"name": "log_likelihood", "data_type": "TYPE_FP64", "dims": table},
        {"name": "is_greedy", "data_type": "TYPE_BOOL", "dims": table},
    ]
    return _pbtxt(score_name(serving.model_name), settings, inputs, outputs, is_decoupled=False)


def _pbtxt(
    name: str,
    settings: dict[str, Any],
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    is_decoupled: bool,
    kind: str = "KIND_CPU",
) -> str:
    """The config.pbtxt of a Python model; `runtime.protocol.model_settings` reads `settings`."""
    config = model_config_pb2.ModelConfig(
        name=name,
        backend="python",
        max_batch_size=0,
        model_transaction_policy={"decoupled": is_decoupled},
        input=inputs,
        output=outputs,
        instance_group=[{"count": 1, "kind": kind}],
        parameters={key: {"string_value": json.dumps(value)} for key, value in settings.items()},
    )
    return str(text_format.MessageToString(config))
